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
from d9d.pipelining.executor import OfflinePipelineExecutor, PipelineScheduleExecutor

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
