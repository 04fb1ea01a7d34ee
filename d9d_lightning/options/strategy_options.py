"""The options of the strategy as one value: what a user has said, before anything runs."""

import dataclasses
from collections.abc import Mapping
from typing import get_args

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.module_names import did_you_mean
from d9d.internals.nonfinite import OnNonfinite
from d9d.module.parallelism.plan import ParallelPlan, word_problems
from d9d_lightning.model_states.options import ModelStateOptions
from d9d_lightning.options.config_check import LauncherName, option_problems, process_problems, refuse_problems
from d9d_lightning.options.mesh import MeshOption
from d9d_lightning.options.schedule import ScheduleSpec, schedule_config
from d9d_lightning.pipeline.cut import PipelineOptions, cut_of, map_stages
from d9d_lightning.pipeline.stages import PipelineStages
from d9d_lightning.placements.explain import accumulation_of, explain_module, steps_line
from d9d_lightning.placements.mesh_check import check_mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """Options of `D9DStrategy`, whose constructor says what they mean."""

    mesh: MeshOption
    plan: ParallelPlan
    pipeline_module: str | None
    stages: PipelineStages
    schedule: ScheduleSpec
    microbatches: int | None
    bucket_size_mb: int
    timeout_s: float | None
    init_timeout_s: float | None
    launcher: LauncherName | None
    on_nonfinite: OnNonfinite
    max_restarts_without_progress: int
    model_states: ModelStateOptions

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a batch."""
        return self.microbatches or 1

    def first_timeout_s(self, module: LightningModule | None) -> float | None:
        """Return the time limit of collectives that a run of a module's Trainer begins with."""
        is_fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        return self.init_timeout_s if is_fitting and self.init_timeout_s is not None else self.timeout_s

    def pipeline(self, mesh: DeviceMeshParameters) -> PipelineOptions | None:
        """Return how the module is cut into stages on a mesh; None if it is not."""
        if not mesh.has_pipeline_parallel or self.pipeline_module is None:
            return None
        return PipelineOptions(
            module_name=self.pipeline_module, stages=self.stages, schedule=schedule_config(self.schedule)
        )

    def check_module(self, module: LightningModule, mesh: DeviceMeshParameters) -> None:
        """Refuse a module of a Trainer that a mesh is not for, unless an earlier run has cut it; see `check_mesh`."""
        if cut_of(module) is None:
            check_mesh(module, self.plan, mesh, module.trainer)

    def explain(self, module: nn.Module, mesh: DeviceMeshParameters, *, is_distributed: bool) -> str:
        """Describe how a module runs on a mesh; see `explain_module`."""
        stages = self.pipeline(mesh)
        return explain_module(
            module,
            self.plan,
            mesh,
            is_distributed=is_distributed,
            steps=steps_line(mesh, self.microbatches, str(self.schedule), accumulation_of(module)),
            stage_map=None if stages is None else map_stages(module, stages, mesh.pipeline_parallel),
        )

    def refuse_problems(self, read_problems: list[str]) -> None:
        """Refuse what cannot be run on any number of processes; see `refuse_problems` of `config_check`.

        Args:
            read_problems: What was wrong when they were read.
        """
        words = word_problems(self.plan.parallelize)
        plan_problems = [f"parallelize: {'. '.join(words)}."] if words else []
        refuse_problems(
            read_problems + self._kind_problems() + plan_problems + self._problems_on(self.mesh.smallest), self.mesh
        )

    def refuse_processes(
        self, environment: ClusterEnvironment, num_devices: int, num_nodes: int, other_problems: list[str]
    ) -> None:
        """Refuse a number of processes that they are not for, and weights that cannot be loaded.

        Args:
            environment: Who starts the processes.
            num_devices: Number of processes on each machine.
            num_nodes: Number of machines.
            other_problems: What else is wrong.
        """
        problems = process_problems(self.mesh, environment, num_devices, num_nodes, self.launcher)
        if not problems:
            problems += self._problems_on(self.mesh.fill(num_devices * num_nodes))
        refuse_problems(problems + self.model_states.source_problems() + other_problems, self.mesh)

    def _problems_on(self, mesh: DeviceMeshParameters) -> list[str]:
        return option_problems(
            mesh,
            pipeline_module=self.pipeline_module,
            schedule=self.schedule,
            microbatches=self.microbatches,
            has_mp_policy=self.plan.has_mp_policy,
            launcher=self.launcher,
            bucket_size_mb=self.bucket_size_mb,
            min_unit_params=self.plan.min_unit_params,
            timeout_s=self.timeout_s,
            init_timeout_s=self.init_timeout_s,
            max_restarts_without_progress=self.max_restarts_without_progress,
            model_states=self.model_states,
        )

    def _kind_problems(self) -> list[str]:
        """Say which options are of another kind than their annotations: nobody has checked them."""
        given: dict[str, object] = {
            **self.plan.fsdp_kwargs,
            "parallelize": self.plan.parallelize,
            "stages": self.stages,
        }
        problems: list[str] = []
        plan, policy = given["parallelize"], given.get("mp_policy")
        if plan is not None and not callable(plan) and not isinstance(plan, Mapping):
            problems.append(
                f"parallelize ({plan!r}) must be a mapping of patterns to words, the path of a YAML file, a function of "
                f"(module, context), or None."
            )
        if not isinstance(policy, MixedPrecisionPolicy | None):
            problems.append(f"mp_policy ({policy!r}) must be a torch.distributed.fsdp.MixedPrecisionPolicy, or None.")
        reshard, stages = given["reshard_after_forward"], given["stages"]
        if not isinstance(reshard, int | None):
            problems.append(f"reshard_after_forward ({reshard!r}) must be True, False, a number of ranks, or None.")
        if not isinstance(stages, PipelineStages):
            problems.append(
                f"stages ({stages!r}) must be a PipelineStages, such as PipelineStages(layers=[...]), or None."
            )
        if self.on_nonfinite not in get_args(OnNonfinite):
            problems.append(
                f"on_nonfinite ({self.on_nonfinite!r}) must be one of {', '.join(map(repr, get_args(OnNonfinite)))}."
                f"{did_you_mean(self.on_nonfinite, get_args(OnNonfinite))}"
            )
        return problems
