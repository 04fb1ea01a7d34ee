"""Run a pack of microbatches forward through the pipeline, and hand the outputs to the task."""

import typing
from typing import cast

import torch

from d9d.core.dist_context import DistributedContext
from d9d.core.types import IdleMicrobatch, MicrobatchPack
from d9d.loop.component.pipeline_state import PipelineStateHandler
from d9d.loop.control import BuildForwardInputsContext, InferenceTask, ProcessOutputsContext
from d9d.loop.control.task import TBatch, TState
from d9d.pipelining.api import TPipelineInput, TPipelineOutput, TSharedInput
from d9d.pipelining.factory import PipelineScheduleInfo

__all__ = ["InferenceTaskOperator", "unwrap_idle"]


def unwrap_idle(microbatch: TBatch | IdleMicrobatch[TBatch]) -> tuple[TBatch, bool]:
    """Return what to run for a microbatch of a pack, and whether it counts for nothing."""
    if isinstance(microbatch, IdleMicrobatch):
        return cast("IdleMicrobatch[TBatch]", microbatch).batch, True
    return cast("TBatch", microbatch), False


class InferenceTaskOperator(typing.Generic[TBatch, TPipelineInput, TSharedInput, TPipelineOutput, TState]):
    """Runs the forward passes of a pack and gives the task each output as soon as it is there.

    Output and state of a microbatch are dropped when the task has processed them, so that memory does not grow over the
    pack. A task that wants to keep an output keeps it itself.

    [Note: no_grad, not inference_mode]
    FSDP keeps the buffers that it gathers parameters into. Allocated under `torch.inference_mode`, they can never be
    written outside of it: whoever runs the model afterwards, such as an event handler, gets "Inplace update to inference
    tensor outside InferenceMode is not allowed" (torch 2.13). The same befalls tensors that a task makes of outputs and
    that are restored from a checkpoint in place. Under `torch.no_grad` neither happens.
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        task: InferenceTask[TBatch, TPipelineInput, TSharedInput, TPipelineOutput, TState],
        pipeline: PipelineScheduleInfo[TPipelineInput, TSharedInput, TPipelineOutput],
        pipeline_state: PipelineStateHandler[TState],
    ) -> None:
        """Connect the task with the pipeline."""
        self._task = task
        self._activity = dist_context.activity
        self._pipeline = pipeline.schedule
        self._has_outputs = pipeline.has_last_stage
        self._waiting: dict[int, TState] = {}
        """States of microbatches that have no output yet, on ranks that will see it."""
        self._state = pipeline_state
        """Holds the state of the microbatch that is being processed, and no other."""

    def forward(self, pack: MicrobatchPack[TBatch | IdleMicrobatch[TBatch]]) -> None:
        """Run all microbatches, and let the task process their outputs on the ranks that host the last stage.

        Outputs of idle microbatches are dropped.

        All ranks of a pipeline must call it, with packs of the same number of microbatches.

        Args:
            pack: Microbatches of this rank, with their tensors on its device.
        """
        try:
            with torch.no_grad():
                self._pipeline.step(*self._build_inputs(pack), self._process)
        finally:
            self._waiting.clear()

    def _build_inputs(
        self, pack: MicrobatchPack[TBatch | IdleMicrobatch[TBatch]]
    ) -> tuple[tuple[TPipelineInput, ...], tuple[TSharedInput, ...]]:
        inputs: list[TPipelineInput] = []
        shared: list[TSharedInput] = []
        for index, microbatch in enumerate(pack):
            batch, is_idle = unwrap_idle(microbatch)
            built = self._task.build_forward_inputs(BuildForwardInputsContext(batch=batch, is_idle=is_idle))
            inputs.append(built.input)
            shared.append(built.shared)
            if self._has_outputs and not is_idle:
                self._waiting[index] = built.state
        return tuple(inputs), tuple(shared)

    def _process(self, output: TPipelineOutput, microbatch_index: int) -> None:
        if microbatch_index not in self._waiting:
            return  # an idle microbatch
        self._activity.place = f"outputs of microbatch {microbatch_index}"
        self._state.store(microbatch_index, self._waiting.pop(microbatch_index))
        try:
            with self._state.scope(microbatch_index) as state:
                self._task.process_outputs(ProcessOutputsContext(pipeline_results=output, state=state))
        finally:
            self._state.reset()
