"""Runs the microbatches of a pack one after another on a single stage; and what all executors check and measure."""

import time
from typing import Any

import torch
from torch import nn

from d9d.core.device import synchronize
from d9d.pipelining.actions import ActionBase, BackwardFullInputComputeAction, ForwardComputeAction
from d9d.pipelining.api import ActionTiming, BackwardObserver, PipelineLossFn, PipelineResultFn, PipelineSchedule

__all__ = ["OfflinePipelineExecutor", "Stopwatch", "check_pack", "checked_loss"]


class Stopwatch:
    """Measures the actions of one step, when it is told to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timings: list[ActionTiming] | None = None
        self._start = self._last = 0.0
        self._has_begun = False

    @property
    def is_running(self) -> bool:
        """Whether the step is to be measured."""
        return self._timings is not None

    def start(self) -> None:
        """Measure the next step."""
        self._timings = []

    def start_step(self) -> None:
        """Set the clock to 0."""
        self._start = time.perf_counter()
        self._last = 0.0
        self._has_begun = False

    def skip(self) -> None:
        """Let the next action begin now, unless a part of it has begun before."""
        if not self._has_begun:
            self._has_begun = True
            synchronize(self._device)
            self._last = time.perf_counter() - self._start

    def lap(self, action: ActionBase) -> None:
        """Take down that an action is done. Without `skip`, it began where the one before ended."""
        synchronize(self._device)
        now = time.perf_counter() - self._start
        if self._timings is not None:
            self._timings.append((action, self._last, now))
        self._last = now
        self._has_begun = False

    def take(self) -> list[ActionTiming]:
        """Return what was measured, and measure no more."""
        timings, self._timings = self._timings or [], None
        return timings


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
        self._stopwatch = Stopwatch(torch.device("cpu"))

    def record_next_step(self) -> None:
        """Measure each forward and backward pass of the next step."""
        # When this was built, the parameters may still have been on the meta device.
        self._stopwatch = Stopwatch(next((p.device for p in self._model.parameters()), torch.device("cpu")))
        self._stopwatch.start()

    def take_timings(self) -> list[ActionTiming]:
        """Return what the recorded step has taken, and record no more."""
        return self._stopwatch.take()

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
        check_pack(num_microbatches, len(shared_microbatches))
        self._stopwatch.start_step()
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
        if self._stopwatch.is_running:
            self._stopwatch.lap(ForwardComputeAction(0, index))
        if self._do_backward:
            self._run_backward(checked_loss(loss, index), index, is_last=index == num_microbatches - 1)
            if self._stopwatch.is_running:
                self._stopwatch.lap(BackwardFullInputComputeAction(0, index, full_backward=True))

    def _run_backward(self, loss: torch.Tensor, microbatch: int, *, is_last: bool) -> None:
        if self._backward_observer is None:
            loss.backward()
            return
        self._backward_observer.before_microbatch(microbatch)
        self._backward_observer.before_backward(0, is_last=is_last, is_split=False)
        loss.backward()
        self._backward_observer.after_backward(0, is_last=is_last, is_split=False)


def check_pack(num_inputs: int, num_shared: int) -> None:
    """Refuse an empty pack, and one whose parts differ in number.

    Raises:
        ValueError: With the numbers.
    """
    if num_inputs != num_shared:
        raise ValueError(f"a pack of {num_inputs} microbatch inputs came with {num_shared} shared values.")
    if num_inputs == 0:
        raise ValueError("a pack must hold at least one microbatch: the data stream yielded an empty one.")


def checked_loss(loss: torch.Tensor | None, index: int) -> torch.Tensor:
    """Return a loss that a backward pass can start from.

    Raises:
        ValueError: It has several elements, is complex, or has no graph.
        TypeError: It is no tensor.
    """
    # Shape and autograd metadata only: reading the value would wait for the device.
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss of microbatch {index} must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss of microbatch {index} has shape {tuple(loss.shape)}: it must hold one value. "
            "Reduce it in compute_loss(), for example with .mean()."
        )
    if loss.is_complex():
        raise ValueError(f"the loss of microbatch {index} is complex: take its real part, or its absolute value.")
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of microbatch {index} depends on no parameter that requires a gradient: check for detach(), "
            "no_grad() or integer operations between the model output and the loss, and for a model that is all frozen."
        )
    return loss
