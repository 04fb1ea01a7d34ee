"""Find everything that is wrong with a job before it starts."""

import tempfile
from pathlib import Path
from typing import Protocol, runtime_checkable

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.launch import LaunchEnvironment
from d9d.loop.config import StepActionSpecial, TrainerConfig


@runtime_checkable
class ChecksMesh(Protocol):
    """A part of a job, such as a data provider, that can tell early whether it fits a mesh."""

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        """Return what does not fit, each with its numbers and a way to mend it. Not collective."""
        ...


def refuse_problems(mesh: DeviceMeshParameters, config: TrainerConfig, data_provider: object) -> None:
    """Refuse a job that cannot run.

    Args:
        mesh: Parallelism degrees.
        config: Settings of the loop.
        data_provider: Checked if it is a `ChecksMesh`.

    Raises:
        ValueError: With all problems that were found.
    """
    problems: list[str] = []
    try:
        # As it would be once pipeline_parallel is mended: its own problem comes below.
        mesh.model_copy(update={"pipeline_parallel": 1}).check_world_size(LaunchEnvironment.read().world_size)
    except ValueError as error:
        problems.append(str(error))
    if mesh.has_pipeline_parallel:
        problems.append(
            f"mesh.pipeline_parallel ({mesh.pipeline_parallel}) must be 1: pipeline programs arrive with a later release."
        )
    if config.model_stage_factory.source_checkpoint is not None:
        problems.append(
            f"trainer.model_stage_factory.source_checkpoint ({config.model_stage_factory.source_checkpoint}) must be "
            f"empty: loading of model states arrives with a later release."
        )
    if isinstance(data_provider, ChecksMesh):
        problems.extend(data_provider.mesh_problems(mesh))
    if not problems and config.checkpointing.period_steps != StepActionSpecial.disable:
        problems.extend(_directory_problems(config.checkpointing.save_dir))
    if problems:
        raise ValueError("The job cannot run as it is configured:\n" + "\n".join(f"- {text}" for text in problems))


def _directory_problems(folder: Path) -> list[str]:
    """Make a folder that will be written to much later, and return why that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [f"trainer.checkpointing.save_dir ({folder}) cannot be written to: {error}. Name another folder."]
    return []
