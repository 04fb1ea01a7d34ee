"""Pipeline schedules by config."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeAlias, runtime_checkable

import torch.distributed as dist
from pydantic import Field, model_validator
from torch import nn

from d9d.core.config import Config
from d9d.core.dist_context import DistributedContext
from d9d.pipelining.api import (
    PipelineSchedule,
    PipelineStageInfo,
    StageBoundary,
    TPipelineInput,
    TPipelineOutput,
    TSharedInput,
)
from d9d.pipelining.executor import PipelineScheduleExecutor
from d9d.pipelining.offline import OfflinePipelineExecutor
from d9d.pipelining.placement import build_stage_to_host_rank_topology, invert_stage_to_host_rank_topology
from d9d.pipelining.programs import ForwardOnlyPipelineProgramBuilder, PipelineProgramBuilder
from d9d.pipelining.schedules import build_program_builder, schedule_problems
from d9d.pipelining.stage import PipelineStage

__all__ = [
    "AnyPipelineScheduleConfig",
    "PipelineSchedule1F1BConfig",
    "PipelineScheduleDualPipeVConfig",
    "PipelineScheduleGPipeConfig",
    "PipelineScheduleInferenceConfig",
    "PipelineScheduleInfo",
    "PipelineScheduleLoopedBFSConfig",
    "PipelineScheduleZeroBubbleVConfig",
    "build_forward_schedule",
    "build_program_builder_from",
    "build_schedule",
    "stages_of_rank",
]


class PipelineScheduleInferenceConfig(Config):
    """Runs forward passes only."""

    schedule: Literal["inference"] = "inference"


class PipelineScheduleGPipeConfig(Config):
    """Runs all forward passes of a pack, then all backward passes, with one stage per rank."""

    schedule: Literal["gpipe"] = "gpipe"


class PipelineScheduleLoopedBFSConfig(Config):
    """Runs all forward passes of a pack breadth first over several stages per rank, then all backward passes."""

    schedule: Literal["looped_bfs"] = "looped_bfs"
    num_stages_per_rank: int = Field(ge=1, description="Number of stages that each pipeline rank hosts.")


class PipelineSchedule1F1BConfig(Config):
    """Alternates forward and backward passes, interleaved over the stages of a rank when it hosts several."""

    schedule: Literal["1f1b"] = "1f1b"
    num_stages_per_rank: int = Field(
        default=1, ge=1, description="Number of stages that each pipeline rank hosts. Default 1: the classic schedule."
    )
    zero_bubble: bool = Field(
        default=False,
        description="Split the backward pass into input and weight gradients, so that weight gradients fill bubbles. Default False.",
    )
    lookahead: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Forward passes that a rank runs ahead of those that fill the pipeline, to hide transfers at the memory of as "
            "many microbatches. With one stage per rank and without zero_bubble only. Default: 1 there; 0 is classic 1F1B."
        ),
    )

    @model_validator(mode="after")
    def _check_lookahead(self) -> Self:
        _refuse_problems(schedule_problems(self.schedule, self.num_stages_per_rank, self.zero_bubble, self.lookahead))
        return self


class PipelineScheduleZeroBubbleVConfig(Config):
    """Places two stages per rank in a V and splits the backward pass."""

    schedule: Literal["zero_bubble_v"] = "zero_bubble_v"


class PipelineScheduleDualPipeVConfig(Config):
    """Places two stages per rank in a V and overlaps forward and backward passes of different microbatches."""

    schedule: Literal["dual_pipe_v"] = "dual_pipe_v"


AnyPipelineScheduleConfig: TypeAlias = Annotated[
    PipelineScheduleInferenceConfig
    | PipelineScheduleGPipeConfig
    | PipelineScheduleLoopedBFSConfig
    | PipelineSchedule1F1BConfig
    | PipelineScheduleZeroBubbleVConfig
    | PipelineScheduleDualPipeVConfig,
    Field(discriminator="schedule"),
]
"""Any pipeline schedule, chosen by its `schedule` field."""


@dataclasses.dataclass(kw_only=True, slots=True)
class PipelineScheduleInfo(Generic[TPipelineInput, TSharedInput, TPipelineOutput]):
    """Pairs a schedule with what this rank hosts of the pipeline.

    Attributes:
        schedule: Runs packs on this rank.
        has_first_stage: This rank feeds pipeline inputs.
        has_last_stage: This rank sees pipeline outputs, so the callback of a step runs here.
        stages_by_rank: Indices of the stages that each pipeline rank hosts, in stage order.
    """

    schedule: PipelineSchedule[TPipelineInput, TSharedInput, TPipelineOutput]
    has_first_stage: bool
    has_last_stage: bool
    stages_by_rank: tuple[tuple[int, ...], ...] = ((0,),)


@runtime_checkable
class _HasTransferSpec(Protocol):
    def stage_transfer_spec(self, pipeline_input: object, boundary: StageBoundary) -> object: ...


def build_program_builder_from(schedule_config: AnyPipelineScheduleConfig) -> PipelineProgramBuilder:
    """Build what composes the programs of a configured schedule."""
    match schedule_config:
        case PipelineSchedule1F1BConfig():
            return build_program_builder(
                schedule_config.schedule,
                schedule_config.num_stages_per_rank,
                schedule_config.zero_bubble,
                schedule_config.lookahead,
            )
        case PipelineScheduleLoopedBFSConfig():
            return build_program_builder(schedule_config.schedule, schedule_config.num_stages_per_rank)
        case _:
            return build_program_builder(schedule_config.schedule)


# `Any`: the types of a stage's input and output are known to the model provider alone.
def build_schedule(
    dist_context: DistributedContext,
    schedule_config: AnyPipelineScheduleConfig,
    model_provider: Callable[[PipelineStageInfo], nn.Module],
) -> tuple[PipelineScheduleInfo[Any, Any, Any], list[nn.Module]]:
    """Build the stages of this rank and the schedule that runs them.

    All ranks must call it. Without pipeline parallelism the whole model is one stage, and the schedules differ in
    whether they run backward passes and in nothing else.

    Args:
        dist_context: Topology of the job.
        schedule_config: Schedule to build.
        model_provider: Builds one stage; called once per stage that this rank hosts, in stage order.

    Returns:
        The schedule, and the modules of this rank in stage order.

    Raises:
        TypeError: A stage cannot say what crosses its boundaries.
    """
    if not dist_context.mesh_params.has_pipeline_parallel:
        module = model_provider(PipelineStageInfo(current_stage=0, num_stages=1))
        do_backward = not isinstance(schedule_config, PipelineScheduleInferenceConfig)
        info: PipelineScheduleInfo[Any, Any, Any] = PipelineScheduleInfo(
            schedule=OfflinePipelineExecutor(module, do_backward=do_backward), has_first_stage=True, has_last_stage=True
        )
        return info, [module]

    builder = build_program_builder_from(schedule_config)
    placement = _StagePlacement.of(dist_context, builder)
    modules = [model_provider(stage) for stage in placement.own]
    info = PipelineScheduleInfo(
        schedule=PipelineScheduleExecutor(dist_context, placement.build_stages(modules), builder),
        has_first_stage=any(stage.is_current_stage_first for stage in placement.own),
        has_last_stage=any(stage.is_current_stage_last for stage in placement.own),
        stages_by_rank=placement.stages_by_rank,
    )
    return info, modules


# `Any`: see above.
def build_forward_schedule(
    dist_context: DistributedContext, schedule_config: AnyPipelineScheduleConfig, modules: Sequence[nn.Module]
) -> PipelineSchedule[Any, Any, Any]:
    """Build a schedule that runs only the forward passes of stages which another schedule trains.

    All ranks must call it, after `build_schedule`. Both may be used in turn.

    Args:
        dist_context: Topology of the job.
        schedule_config: The schedule that trains them, which says where the stages are.
        modules: Stages of this rank in stage order, as `build_schedule` has returned them.
    """
    if not dist_context.mesh_params.has_pipeline_parallel:
        return OfflinePipelineExecutor(modules[0], do_backward=False)
    builder = build_program_builder_from(schedule_config)
    stages = _StagePlacement.of(dist_context, builder).build_stages(modules)
    return PipelineScheduleExecutor(dist_context, stages, ForwardOnlyPipelineProgramBuilder(builder))


def stages_of_rank(
    dist_context: DistributedContext, schedule_config: AnyPipelineScheduleConfig
) -> tuple[PipelineStageInfo, ...]:
    """Return the stages that this rank hosts under a schedule, in stage order. All ranks must call it."""
    if not dist_context.mesh_params.has_pipeline_parallel:
        return (PipelineStageInfo(current_stage=0, num_stages=1),)
    return _StagePlacement.of(dist_context, build_program_builder_from(schedule_config)).own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StagePlacement:
    """Where the stages of a schedule are."""

    group: dist.ProcessGroup
    hosts: dict[int, int]
    """Rank in the group of each stage."""
    stages_by_rank: tuple[tuple[int, ...], ...]
    own: tuple[PipelineStageInfo, ...]
    """Stages of this rank."""

    @classmethod
    def of(cls, dist_context: DistributedContext, builder: PipelineProgramBuilder) -> Self:
        """Lay out the stages. All ranks must call it."""
        group = dist_context.pipeline_group
        num_stages = group.size() * builder.num_stages_per_rank
        hosts = build_stage_to_host_rank_topology(group.size(), num_stages, builder.topology_style)
        by_rank = invert_stage_to_host_rank_topology(hosts)
        return cls(
            group=group,
            hosts=hosts,
            stages_by_rank=tuple(tuple(by_rank[rank]) for rank in range(group.size())),
            own=tuple(PipelineStageInfo(current_stage=i, num_stages=num_stages) for i in by_rank[group.rank()]),
        )

    # `Any`: see above.
    def build_stages(self, modules: Sequence[nn.Module]) -> list[PipelineStage[Any, Any, Any, Any]]:
        """Make the stages of this rank around their modules.

        Raises:
            TypeError: A module cannot say what crosses its boundaries.
        """
        for module in modules:
            if not isinstance(module, _HasTransferSpec):
                raise TypeError(
                    f"{type(module).__name__} has no stage_transfer_spec(pipeline_input, boundary): a stage of a "
                    f"pipeline must say what crosses its boundaries. See d9d.pipelining.api.ModuleSupportsPipelining."
                )
        return [
            PipelineStage(stage, module, self.group, self.hosts)
            for stage, module in zip(self.own, modules, strict=True)
        ]


def _refuse_problems(problems: list[str]) -> None:
    if problems:
        raise ValueError(" ".join(problems))
