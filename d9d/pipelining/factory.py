"""Pipeline schedules by config."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from d9d.core.dist_context import DistributedContext
from d9d.pipelining.api import PipelineSchedule, PipelineStageInfo, TPipelineInput, TPipelineOutput, TSharedInput
from d9d.pipelining.executor import OfflinePipelineExecutor

__all__ = [
    "AnyPipelineScheduleConfig",
    "PipelineSchedule1F1BConfig",
    "PipelineScheduleDualPipeVConfig",
    "PipelineScheduleGPipeConfig",
    "PipelineScheduleInferenceConfig",
    "PipelineScheduleInfo",
    "PipelineScheduleLoopedBFSConfig",
    "PipelineScheduleZeroBubbleVConfig",
    "build_schedule",
]


class PipelineScheduleInferenceConfig(BaseModel):
    """Runs forward passes only."""

    model_config = ConfigDict(extra="forbid")

    schedule: Literal["inference"] = "inference"


class PipelineScheduleGPipeConfig(BaseModel):
    """Runs all forward passes of a pack, then all backward passes, with one stage per rank."""

    model_config = ConfigDict(extra="forbid")

    schedule: Literal["gpipe"] = "gpipe"


class PipelineScheduleLoopedBFSConfig(BaseModel):
    """Runs all forward passes of a pack breadth first over several stages per rank, then all backward passes."""

    model_config = ConfigDict(extra="forbid")

    schedule: Literal["looped_bfs"] = "looped_bfs"
    num_stages_per_rank: int = Field(ge=1, description="Number of stages that each pipeline rank hosts.")


class PipelineSchedule1F1BConfig(BaseModel):
    """Alternates forward and backward passes, interleaved over the stages of a rank when it hosts several."""

    model_config = ConfigDict(extra="forbid")

    schedule: Literal["1f1b"] = "1f1b"
    num_stages_per_rank: int = Field(ge=1, description="Number of stages that each pipeline rank hosts.")
    zero_bubble: bool = Field(
        description="Split the backward pass into input and weight gradients, so that weight gradients fill bubbles."
    )


class PipelineScheduleZeroBubbleVConfig(BaseModel):
    """Places two stages per rank in a V and splits the backward pass."""

    model_config = ConfigDict(extra="forbid")

    schedule: Literal["zero_bubble_v"] = "zero_bubble_v"


class PipelineScheduleDualPipeVConfig(BaseModel):
    """Places two stages per rank in a V and overlaps forward and backward passes of different microbatches."""

    model_config = ConfigDict(extra="forbid")

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
    """

    schedule: PipelineSchedule[TPipelineInput, TSharedInput, TPipelineOutput]
    has_first_stage: bool
    has_last_stage: bool


# `Any`: the types of a stage's input and output are known to the model provider alone.
def build_schedule(
    dist_context: DistributedContext,
    schedule_config: AnyPipelineScheduleConfig,
    model_provider: Callable[[PipelineStageInfo], nn.Module],
) -> tuple[PipelineScheduleInfo[Any, Any, Any], list[nn.Module]]:
    """Build the stages of this rank and the schedule that runs them.

    Must be called on every rank if `model_provider` is collective. Without pipeline parallelism the whole model is one
    stage, and the schedules differ in whether they run backward passes and in nothing else.

    Args:
        dist_context: Topology of the job.
        schedule_config: Schedule to build.
        model_provider: Builds one stage; called once per stage that this rank hosts, in stage order.

    Returns:
        The schedule, and the modules of this rank in stage order.

    Raises:
        NotImplementedError: The mesh asks for several pipeline ranks.
    """
    num_pipeline_ranks = dist_context.mesh_params.pipeline_parallel
    if num_pipeline_ranks > 1:
        raise NotImplementedError(
            f"mesh.pipeline_parallel ({num_pipeline_ranks}) must be 1: pipeline programs "
            f"(here: {schedule_config.schedule}) arrive with a later release."
        )
    module = model_provider(PipelineStageInfo(current_stage=0, num_stages=1))
    do_backward = not isinstance(schedule_config, PipelineScheduleInferenceConfig)
    info: PipelineScheduleInfo[Any, Any, Any] = PipelineScheduleInfo(
        schedule=OfflinePipelineExecutor(module, do_backward=do_backward),
        has_first_stage=True,
        has_last_stage=True,
    )
    return info, [module]
