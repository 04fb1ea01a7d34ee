"""Run a pack of microbatches through the pipeline, with the task in between."""

import typing
from collections.abc import Sequence
from functools import partial

import torch

from d9d.core.dist_context import DistributedContext
from d9d.core.pytree import tree_leaves
from d9d.core.side_loss import LOSS_SCALE, announce_loss
from d9d.core.types import IdleMicrobatch, MicrobatchPack
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.inference_operator import InferenceTaskOperator, unwrap_idle
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.pipeline_state import PipelineStateHandler
from d9d.loop.component.pipeline_timeline import PipelineTimelineRecorder
from d9d.loop.config import PipelineTimelineConfig
from d9d.loop.control import BuildForwardInputsContext, ComputeLossContext, TrainTask, UpdateMetricsContext
from d9d.loop.control.task import TBatch, TState
from d9d.metric.impl.container import ComposeMetric
from d9d.pipelining.api import TPipelineInput, TPipelineOutput, TSharedInput
from d9d.pipelining.factory import PipelineScheduleInfo

__all__ = ["InferenceTaskOperator", "TrainTaskOperator"]


class TrainTaskOperator(typing.Generic[TBatch, TPipelineInput, TSharedInput, TPipelineOutput, TState]):
    """Runs forward and backward passes of a pack and calls the task for each microbatch."""

    def __init__(
        self,
        dist_context: DistributedContext,
        task: TrainTask[TBatch, TPipelineInput, TSharedInput, TPipelineOutput, TState],
        pipeline: PipelineScheduleInfo[TPipelineInput, TSharedInput, TPipelineOutput],
        pipeline_state: PipelineStateHandler[TState],
        gradient_manager: GradientManager,
        job_schedule: JobSchedule,
        metrics: ComposeMetric,
        timeline: PipelineTimelineConfig | None = None,
    ) -> None:
        """Connect the task with the pipeline; the gradient manager hears about each backward pass."""
        self._activity = dist_context.activity
        self._task = task
        self._pipeline = pipeline.schedule
        self._state = pipeline_state
        self._gradient_manager = gradient_manager
        self._idle: set[int] = set()
        """Microbatches of the pack that count for nothing."""
        self._schedule = job_schedule
        self._metrics = metrics
        self._recorder = PipelineTimelineRecorder(dist_context, timeline, job_schedule, self._pipeline)
        self._pipeline.set_backward_observer(gradient_manager)

    def forward_backward(self, pack: MicrobatchPack[TBatch | IdleMicrobatch[TBatch]]) -> None:
        """Run the forward and backward passes of all microbatches; gradients are being summed when it returns.

        Of idle microbatches, the task sees the inputs only. Their backward passes run with a weight of 0.

        Args:
            pack: Microbatches of this rank, with their tensors on its device.
        """
        inputs: list[TPipelineInput] = []
        shared: list[TSharedInput] = []
        weights: list[torch.Tensor | None] = []
        try:
            for index, microbatch in enumerate(pack):
                batch, is_idle = unwrap_idle(microbatch)
                built = self._task.build_forward_inputs(BuildForwardInputsContext(batch=batch, is_idle=is_idle))
                inputs.append(built.input)
                shared.append(built.shared)
                weights.append(torch.zeros(()) if is_idle else built.loss_weight)
                self._state.store(index, built.state)
                if is_idle:
                    self._idle.add(index)
            self._gradient_manager.set_required_accumulations(len(inputs), weights)
            with self._recorder.watch_step():
                self._pipeline.step(tuple(inputs), tuple(shared), partial(self._weighted_loss, weights))
        finally:
            LOSS_SCALE.set(None)
            self._state.reset()
            self._idle.clear()

    def _weighted_loss(
        self, weights: Sequence[torch.Tensor | None], output: TPipelineOutput, microbatch_index: int
    ) -> torch.Tensor:
        self._activity.place = f"from the loss of microbatch {microbatch_index} on"
        weight = weights[microbatch_index]
        if microbatch_index in self._idle:
            nothing = torch.zeros(())
            _silence_where_zero(output, nothing)
            return self._gradient_manager.add_loss_with_weight(_announced(_any_loss(output)), nothing)
        with self._state.scope(microbatch_index) as state:
            result = self._task.compute_loss(
                ComputeLossContext(pipeline_results=output, state=state, schedule=self._schedule)
            )
            self._task.update_metrics(UpdateMetricsContext(state=state, metrics=self._metrics.children))
        if result.loss_weight is not None:
            _refuse_second_weight(weight)
            weight = result.loss_weight
        if weight is not None:
            _silence_where_zero(output, weight)
        return self._gradient_manager.add_loss_with_weight(_announced(result.loss), weight)


def _announced(loss: torch.Tensor) -> torch.Tensor:
    return announce_loss(loss) if LOSS_SCALE.is_awaited else loss


def _refuse_second_weight(known: torch.Tensor | None) -> None:
    if known is not None:
        raise ValueError(
            "both build_forward_inputs() and compute_loss() returned a loss_weight for one microbatch. Return it in one place."
        )


def _any_loss(output: object) -> torch.Tensor:
    """Return a loss that depends on all of an output."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum().real for leaf in leaves]).sum() if leaves else torch.zeros(())


def _silence_where_zero(output: object, weight: torch.Tensor) -> None:
    """Let no gradient pass into the model for a microbatch of weight 0.

    The loss of a microbatch without a single label is often 0 / 0, whose gradient is NaN even after multiplication
    with 0.
    """
    if weight.device.type == "cpu" and weight != 0:
        # Known without waiting for a device, so spare the pass over the gradients of the output.
        return
    leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            is_silent = weight.detach().to(leaf.device).reshape(()) == 0
            leaf.register_hook(lambda grad, is_silent=is_silent: grad.masked_fill(is_silent, 0.0))
