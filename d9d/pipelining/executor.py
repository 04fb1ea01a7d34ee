"""Runs packs of microbatches: by a program over the stages of a pipeline, or one after another on a single stage."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from d9d.core.device import synchronize
from d9d.core.dist_context import DistributedContext
from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    flat_actions,
)
from d9d.pipelining.api import (
    ActionTiming,
    BackwardObserver,
    PipelineLossFn,
    PipelineResultFn,
    PipelineSchedule,
    StageBoundary,
)
from d9d.pipelining.communications import post_receives_early
from d9d.pipelining.failure import FailureBoard
from d9d.pipelining.p2p import BufferPool, Transport, build_transport
from d9d.pipelining.programs import PipelineProgramBuilder
from d9d.pipelining.stage import PipelineStage
from d9d.pipelining.validate import validate_program

__all__ = ["OfflinePipelineExecutor", "PipelineScheduleExecutor"]

AnyPipelineStage: TypeAlias = PipelineStage[Any, Any, Any, Any]


MAX_VALIDATED_ACTIONS = 50_000
"""Actions of all ranks up to which an executor validates a program that it has composed."""


class _RankProgram:
    """What this rank does with a pack of some size, looked up once."""

    def __init__(self, actions: Sequence[ActionBase]) -> None:
        self.actions = tuple(actions)
        flat = list(flat_actions(actions))
        self.has_backward = any(action.has_backward_work for action in flat)
        self.num_weight_passes = Counter(action.stage_idx for action in flat if _produces_weight_gradients(action))


def _produces_weight_gradients(
    action: ActionBase,
) -> TypeGuard[BackwardFullInputComputeAction | BackwardWeightComputeAction]:
    match action:
        case BackwardFullInputComputeAction(full_backward=is_full):
            return is_full
        case BackwardWeightComputeAction():
            return True
        case _:
            return False


class _Stopwatch:
    """Measures the actions of one step, when it is told to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timings: list[ActionTiming] | None = None
        self._start = self._last = 0.0

    @property
    def is_running(self) -> bool:
        return self._timings is not None

    def start(self) -> None:
        self._timings = []

    def start_step(self) -> None:
        self._start = time.perf_counter()
        self._last = 0.0

    def skip(self) -> None:
        """Let the next action begin now."""
        synchronize(self._device)
        self._last = time.perf_counter() - self._start

    def lap(self, action: ActionBase) -> None:
        """Take down that an action, which began where the one before ended, is done."""
        synchronize(self._device)
        now = time.perf_counter() - self._start
        if self._timings is not None:
            self._timings.append((action, self._last, now))
        self._last = now

    def take(self) -> list[ActionTiming]:
        timings, self._timings = self._timings or [], None
        return timings


# `Any`: the executors pass what the job's own types hold from the task to the model and back, and look at none of it.
class _PackRun:
    """The `ActionContext` of one pack."""

    def __init__(
        self,
        stages: Mapping[int, AnyPipelineStage],
        transport: Transport,
        program: _RankProgram,
        inputs: tuple[Any, ...],
        shared: tuple[Any, ...],
        callback: PipelineLossFn[Any] | PipelineResultFn[Any],
        observer: BackwardObserver | None,
        stopwatch: _Stopwatch,
    ) -> None:
        self._stages = stages
        self._transport = transport
        self._has_backward = program.has_backward
        self._inputs = inputs
        self._shared = shared
        self._callback = callback
        self._observer = observer
        self._positions = {index: position for position, index in enumerate(stages)}
        self._stopwatch = stopwatch if stopwatch.is_running else None
        self._num_weight_passes_left = program.num_weight_passes.copy()

    def forward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Run a microbatch through a stage, and the callback of the step behind the last one."""
        self._transport.flush()
        stage = self._stages[stage_idx]
        if self._stopwatch is not None:
            stage.wait_for_input(microbatch_idx)
            self._stopwatch.skip()
        output = stage.forward(microbatch_idx, self._inputs[microbatch_idx], self._shared[microbatch_idx])
        if not stage.info.is_current_stage_last:
            return
        result = self._callback(output, microbatch_idx)
        if self._has_backward:
            stage.set_loss(microbatch_idx, _checked_loss(result, microbatch_idx))

    def backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute all gradients of a microbatch in a stage."""
        self._run_weight_pass(self._stages[stage_idx].backward, stage_idx, microbatch_idx, is_second_half=False)

    def backward_input(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute the gradients of a stage's inputs."""
        self._start_backward(stage_idx, microbatch_idx)
        if self._observer is not None:
            self._observer.before_split_backward(self._positions[stage_idx])
        self._stages[stage_idx].backward_input(microbatch_idx)

    def backward_weight(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute the gradients of a stage's weights that are left."""
        self._run_weight_pass(self._stages[stage_idx].backward_weight, stage_idx, microbatch_idx, is_second_half=True)

    def _run_weight_pass(
        self, run: Callable[[int], None], stage_idx: int, microbatch_idx: int, *, is_second_half: bool
    ) -> None:
        self._start_backward(stage_idx, microbatch_idx)
        if self._observer is None:
            run(microbatch_idx)
            return
        self._num_weight_passes_left[stage_idx] -= 1
        is_last = self._num_weight_passes_left[stage_idx] == 0
        position = self._positions[stage_idx]
        self._observer.before_backward(position, is_last=is_last, is_second_half=is_second_half)
        run(microbatch_idx)
        if is_last:
            self._observer.after_last_backward(position, is_second_half=is_second_half)

    def _start_backward(self, stage_idx: int, microbatch_idx: int) -> None:
        self._transport.flush()
        if self._stopwatch is not None:
            # What a rank waits for is no work of its own.
            self._stages[stage_idx].wait_for_gradients(microbatch_idx)
            self._stopwatch.skip()

    def send_forward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to send the output of a stage."""
        self._stages[stage_idx].send_forward(microbatch_idx)

    def receive_forward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to receive the input of a stage."""
        self._stages[stage_idx].receive_forward(microbatch_idx, self._inputs[microbatch_idx])

    def send_backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to send the gradients of a stage's input."""
        self._stages[stage_idx].send_backward(microbatch_idx)

    def receive_backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to receive the gradients of a stage's output."""
        self._stages[stage_idx].receive_backward(microbatch_idx)


class PipelineScheduleExecutor(PipelineSchedule[Any, Any, Any]):
    """Runs the program of a schedule over the stages of this rank."""

    def __init__(
        self,
        dist_context: DistributedContext,
        stages: Sequence[AnyPipelineStage],
        program_builder: PipelineProgramBuilder,
    ) -> None:
        """Connect stages and schedule. Nothing is sent before the first step.

        Args:
            dist_context: Topology of the job.
            stages: The stages of this rank, in stage order.
            program_builder: Composes a program for each number of microbatches that comes along.
        """
        self._device = dist_context.current_device
        self._group = stages[0].group
        self._stages = {stage.info.current_stage: stage for stage in stages}
        self._builder = program_builder
        self._programs: dict[int, _RankProgram] = {}
        self._observer: BackwardObserver | None = None
        self._transport = build_transport(self._group, self._device)
        self._pool = BufferPool(self._device)
        self._failures = FailureBoard(self._group, self._device)
        self._has_failed = False
        self._stopwatch = _Stopwatch(self._device)
        for stage in stages:
            stage.connect(self._stages, self._transport, self._pool, self._device)

    def set_backward_observer(self, observer: BackwardObserver | None) -> None:
        """Tell one object about each backward pass from the next step on."""
        self._observer = observer

    def record_next_step(self) -> None:
        """Measure each action of the next step."""
        self._stopwatch.start()

    def take_timings(self) -> list[ActionTiming]:
        """Return what the recorded step has taken, and record no more."""
        return self._stopwatch.take()

    def step(
        self,
        inputs_microbatches: tuple[Any, ...],
        shared_microbatches: tuple[Any, ...],
        callback: PipelineLossFn[Any] | PipelineResultFn[Any],
    ) -> None:
        """Run one pack. All ranks of the pipeline must call it, with as many microbatches.

        Raises:
            ValueError: The pack is empty, or ranks have different numbers of microbatches in the first step.
            PipelineActionError: An action has failed on this rank; its cause is what the user's code has raised.
            PipelinePeerError: An action has failed on another rank.
            RuntimeError: A step has failed before.
        """
        if self._has_failed:
            raise RuntimeError("the pipeline has failed in an earlier step and can not go on: start the job anew.")
        _check_pack(len(inputs_microbatches), len(shared_microbatches))
        program = self._program(inputs_microbatches)
        for stage in self._stages.values():
            stage.start_pack(has_backward=program.has_backward)
        run = _PackRun(
            self._stages,
            self._transport,
            program,
            inputs_microbatches,
            shared_microbatches,
            callback,
            self._observer,
            self._stopwatch,
        )
        self._run(program, run)
        self._pool.end_step()

    def _run(self, program: _RankProgram, run: _PackRun) -> None:
        action = program.actions[0]
        is_measured = self._stopwatch.is_running
        try:
            self._stopwatch.start_step()
            for action in program.actions:
                action.apply(run)
                if is_measured:
                    self._stopwatch.lap(action)
            self._transport.finish()
        except Exception as error:
            self._has_failed = True
            raise self._failures.report(action, error) from error
        except BaseException as error:
            self._has_failed = True
            self._failures.report_interruption(action, error)
            raise

    def _program(self, inputs: tuple[Any, ...]) -> _RankProgram:
        num_microbatches = len(inputs)
        if num_microbatches not in self._programs:
            self._agree_on_pack(inputs)
            programs = self._builder.compose(num_microbatches=num_microbatches, pp_size=self._group.size())
            # The check takes seconds for programs of a million actions. What is wrong with a builder shows in small ones.
            if sum(map(len, programs.values())) <= MAX_VALIDATED_ACTIONS:
                validate_program(programs)
            own = programs[self._group.rank()]
            self._programs[num_microbatches] = _RankProgram(post_receives_early(own, self._transport.passes_ahead))
        return self._programs[num_microbatches]

    def _agree_on_pack(self, inputs: tuple[Any, ...]) -> None:
        """Refuse packs that do not fit together, on all ranks, while nobody waits for what never comes.

        Done for each new number of microbatches. In between, ranks are trusted to go on as they have begun.
        """
        transfers: _Transfers = {}
        # What fails here fails again in the step, where it is reported with its action.
        with contextlib.suppress(Exception):
            for index, stage in self._stages.items():
                for boundary, texts in stage.describe_transfers(inputs).items():
                    transfers[index, boundary] = texts
        gathered: list[tuple[int, _Transfers]] = [(0, {})] * self._group.size()
        dist.all_gather_object(gathered, (len(inputs), transfers), group=self._group)
        by_rank = [num_microbatches for num_microbatches, _ in gathered]
        if len(set(by_rank)) > 1:
            raise ValueError(
                f"the ranks of a pipeline have packs of different sizes: {by_rank} microbatches by pipeline rank. Each "
                f"must read the same data: a data provider may look at dp_rank, but not at the global rank."
            )
        _refuse_different_transfers({key: texts for _, of_rank in gathered for key, texts in of_rank.items()})


_Transfers: TypeAlias = dict[tuple[int, StageBoundary], list[str]]
"""What is exchanged for each microbatch, by stage and boundary."""


def _refuse_different_transfers(transfers: _Transfers) -> None:
    for (stage, boundary), sent in sorted(transfers.items(), key=lambda item: item[0][0]):
        expected = transfers.get((stage + 1, StageBoundary.incoming), sent)
        if boundary is StageBoundary.incoming or sent == expected:
            continue
        microbatch = next(index for index, pair in enumerate(zip(sent, expected, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"stage {stage} sends something else than stage {stage + 1} expects for microbatch {microbatch}, by their "
            f"stage_transfer_spec().\n"
            f"  stage {stage}, StageBoundary.outgoing: {sent[microbatch]}\n"
            f"  stage {stage + 1}, StageBoundary.incoming: {expected[microbatch]}\n"
            f"Both must give the same, and pipeline_input must be the same on all ranks of a pipeline."
        )


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
        self._stopwatch = _Stopwatch(torch.device("cpu"))

    def record_next_step(self) -> None:
        """Measure each forward and backward pass of the next step."""
        # When this was built, the parameters may still have been on the meta device.
        self._stopwatch = _Stopwatch(next((p.device for p in self._model.parameters()), torch.device("cpu")))
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
        _check_pack(num_microbatches, len(shared_microbatches))
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
            self._run_backward(_checked_loss(loss, index), is_last=index == num_microbatches - 1)
            if self._stopwatch.is_running:
                self._stopwatch.lap(BackwardFullInputComputeAction(0, index, full_backward=True))

    def _run_backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        if self._backward_observer is None:
            loss.backward()
            return
        self._backward_observer.before_backward(0, is_last=is_last, is_second_half=False)
        loss.backward()
        if is_last:
            self._backward_observer.after_last_backward(0, is_second_half=False)


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
