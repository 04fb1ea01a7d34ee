"""Re-exports actions and the executors that run them."""

from d9d.pipelining.actions import (
    ActionBase,
    ActionContext,
    ActionWorkType,
    BackwardFullInputComputeAction,
    BackwardReceiveAction,
    BackwardSendAction,
    BackwardWeightComputeAction,
    ComposeAction,
    ForwardComputeAction,
    ForwardReceiveAction,
    ForwardSendAction,
)
from d9d.pipelining.executor import PipelineScheduleExecutor
from d9d.pipelining.offline import OfflinePipelineExecutor

__all__ = [
    "ActionBase",
    "ActionContext",
    "ActionWorkType",
    "BackwardFullInputComputeAction",
    "BackwardReceiveAction",
    "BackwardSendAction",
    "BackwardWeightComputeAction",
    "ComposeAction",
    "ForwardComputeAction",
    "ForwardReceiveAction",
    "ForwardSendAction",
    "OfflinePipelineExecutor",
    "PipelineScheduleExecutor",
]
