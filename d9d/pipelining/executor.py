"""Runs the microbatches of a pack one after another on a single stage."""

from typing import Any

import torch
from torch import nn

from d9d.pipelining.api import BackwardObserver, PipelineLossFn, PipelineResultFn, PipelineSchedule

__all__ = ["OfflinePipelineExecutor"]


# `Any`: the executor passes what the job's own types hold from the task to the model and back, and looks at none of it.
class OfflinePipelineExecutor(PipelineSchedule[Any, Any, Any]):
    """Runs forward, callback and backward of each microbatch in turn, without communication between stages.

    The graph of a microbatch is freed before the next forward pass starts, so that one microbatch's activations are held
    at a time, however many the pack has.

    Args:
        model: The only stage, called as `model(inputs, shared)`.
        do_backward: Run the backward pass from what the callback returns.
        backward_observer: Hears about each backward pass before it runs.
    """

    def __init__(self, model: nn.Module, do_backward: bool, backward_observer: BackwardObserver | None = None) -> None:
        self._model = model
        self._do_backward = do_backward
        self._backward_observer = backward_observer

    def set_backward_observer(self, observer: BackwardObserver | None) -> None:
        """Tell one object about each backward pass from the next step on."""
        self._backward_observer = observer

    def step(
        self,
        inputs_microbatches: tuple[Any, ...],
        shared_microbatches: tuple[Any, ...],
        callback: PipelineLossFn[Any] | PipelineResultFn[Any],
    ) -> None:
        """Run one pack on the only stage.

        Raises:
            ValueError: The pack is empty, or a loss has several elements or no graph.
            TypeError: The callback returned something else than a tensor, and there is a backward pass.
        """
        num_microbatches = len(inputs_microbatches)
        _check_pack(num_microbatches, len(shared_microbatches))
        for index in range(num_microbatches):
            self._run_microbatch(
                inputs_microbatches[index], shared_microbatches[index], callback, index, num_microbatches
            )

    def _run_microbatch(
        self,
        inputs: object,
        shared: object,
        callback: PipelineLossFn[Any] | PipelineResultFn[Any],
        index: int,
        num_microbatches: int,
    ) -> None:
        # Locals of this frame are what keeps the graph alive: they go when it returns.
        loss = callback(self._model(inputs, shared), index)
        if not self._do_backward:
            return
        loss = _checked_loss(loss, index)
        if self._backward_observer is not None:
            self._backward_observer.before_backward(index, num_microbatches)
        loss.backward()


def _check_pack(num_inputs: int, num_shared: int) -> None:
    if num_inputs != num_shared:
        raise ValueError(f"a pack of {num_inputs} microbatch inputs came with {num_shared} shared values.")
    if num_inputs == 0:
        raise ValueError("a pack must hold at least one microbatch: the data stream yielded an empty one.")


def _checked_loss(loss: torch.Tensor | None, index: int) -> torch.Tensor:
    # Shape and autograd metadata only: reading the value would wait for the device.
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss of microbatch {index} must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss of microbatch {index} has shape {tuple(loss.shape)}: it must hold one value. "
            "Reduce it in compute_loss(), for example with .mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of microbatch {index} depends on no parameter that requires a gradient: check for detach(), "
            "no_grad() or integer operations between the model output and the loss, and for a model that is all frozen."
        )
    return loss
