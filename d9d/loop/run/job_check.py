"""Find everything that is wrong with a job before it starts."""

import tempfile
from pathlib import Path
from typing import Any

from d9d.checkpoint.folder import make_folder
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.launch import LaunchEnvironment
from d9d.core.protocol import ChecksMesh
from d9d.internals.model_states import source_problems
from d9d.loop.config import InferenceConfig, StepActionSpecial, TrainerConfig
from d9d.loop.control import ModelProvider
from d9d.pipelining.factory import (
    PipelineScheduleInferenceConfig,
    build_program_builder_from,
)
from d9d.pipelining.programs import splits_backward


def refuse_problems(
    mesh: DeviceMeshParameters,
    config: TrainerConfig | InferenceConfig,
    model_provider: ModelProvider[Any],  # Any: only the job knows its model
    data_provider: object,
) -> None:
    """Refuse a job that cannot run.

    Args:
        mesh: Parallelism degrees.
        config: Settings of the loop.
        model_provider: Says whether its model fits.
        data_provider: Checked if it is a `ChecksMesh`.

    Raises:
        ValueError: With all problems that were found.
    """
    root = "trainer" if isinstance(config, TrainerConfig) else "inference"
    problems: list[str] = []
    try:
        mesh.check_world_size(LaunchEnvironment.read().world_size)
    except ValueError as error:
        problems.append(str(error))
    if isinstance(config, TrainerConfig) and mesh.has_pipeline_parallel:
        problems.extend(_pipeline_problems(config))
    if isinstance(config, TrainerConfig):
        timeline, total_steps = config.pipelining.timeline, config.schedule.total_steps
        if timeline is not None and total_steps is not None and timeline.step > total_steps:
            problems.append(
                f"trainer.pipelining.timeline.step ({timeline.step}) is after the last step of the job ({total_steps})."
            )
    if config.checkpointing.on_best is not None:
        problems.extend(_best_problems(config))
    source = config.model_stage_factory.source_checkpoint
    if source is not None:
        problems.extend(source_problems(f"{root}.model_stage_factory.source_checkpoint", source))
    problems.extend(model_provider.mesh_problems(mesh, _num_stages(mesh, config)))
    if isinstance(data_provider, ChecksMesh):
        problems.extend(data_provider.mesh_problems(mesh))
    if not problems and config.checkpointing.period_steps != StepActionSpecial.disable:
        folder = config.checkpointing.save_dir
        of_run = folder / config.run.name if isinstance(config, TrainerConfig) else folder
        share_with_group = config.checkpointing.share_with_group
        problems.extend(_directory_problems(f"{root}.checkpointing.save_dir", of_run, share_with_group))
    if problems:
        raise ValueError("The job cannot run as it is configured:\n" + "\n".join(f"- {text}" for text in problems))


def _num_stages(mesh: DeviceMeshParameters, config: TrainerConfig | InferenceConfig) -> int:
    if not mesh.has_pipeline_parallel or isinstance(config, InferenceConfig):
        return mesh.pipeline_parallel
    return mesh.pipeline_parallel * build_program_builder_from(config.pipelining.schedule).num_stages_per_rank


def _pipeline_problems(config: TrainerConfig) -> list[str]:
    schedule = config.pipelining.schedule
    problems: list[str] = []
    if isinstance(schedule, PipelineScheduleInferenceConfig):
        problems.append(
            "trainer.pipelining.schedule (inference) runs no backward passes. Choose gpipe, looped_bfs, 1f1b, "
            "zero_bubble_v or dual_pipe_v."
        )
    if config.gradient_manager.fsdp_keep_sharded and splits_backward(build_program_builder_from(schedule), pp_size=2):
        problems.append(
            f"trainer.gradient_manager.fsdp_keep_sharded (true) sums gradients in every backward pass, but "
            f"trainer.pipelining.schedule ({schedule.schedule}) splits backward passes and computes the gradients of the "
            f"weights outside of them. Set it to false, or choose a schedule without zero bubble."
        )
    return problems


def _best_problems(config: TrainerConfig | InferenceConfig) -> list[str]:
    if not isinstance(config, TrainerConfig):
        return ["inference.checkpointing.on_best is for training: an inference job logs no values. Leave it out."]
    if config.logging.period_steps == StepActionSpecial.disable:
        return [
            "trainer.checkpointing.on_best needs logged values, and trainer.logging.period_steps is 'disable'. Set a period."
        ]
    return []


def _directory_problems(name: str, folder: Path, share_with_group: bool) -> list[str]:
    """Make a folder that will be written to much later, and return why that is not possible."""
    try:
        make_folder(folder, share_with_group=share_with_group)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [f"{name} ({folder}) cannot be written to: {error}. Name another folder."]
    return []
