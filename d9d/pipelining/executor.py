"""Runs packs of microbatches by a program over the stages of a pipeline."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from d9d.core.dist_context import DistributedContext
from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    flat_actions,
)
from d9d.pipelining.agreement import agree_on_pack
from d9d.pipelining.api import (
    ActionTiming,
    BackwardObserver,
    PipelineLossFn,
    PipelineResultFn,
    PipelineSchedule,
)
from d9d.pipelining.communications import post_receives_early
from d9d.pipelining.failure import FailureBoard
from d9d.pipelining.offline import Stopwatch, check_pack, checked_loss
from d9d.pipelining.p2p import BufferPool, Transport, build_transport
from d9d.pipelining.programs import PipelineProgramBuilder, splits_backward
from d9d.pipelining.stage import PipelineStage
from d9d.pipelining.validate import validate_program

__all__ = ["PipelineScheduleExecutor"]

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


# `Any`: the executor passes what the job's own types hold from the task to the model and back, and look at none of it.
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
        stopwatch: Stopwatch,
        is_split: bool,
    ) -> None:
        self._stages = stages
        self._transport = transport
        self._has_backward = program.has_backward
        self._is_split = is_split
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
        if not stage.is_last:
            return
        result = self._callback(output, microbatch_idx)
        if self._has_backward:
            stage.set_loss(microbatch_idx, checked_loss(result, microbatch_idx))

    def backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute all gradients of a microbatch in a stage."""
        self._run_weight_pass(self._stages[stage_idx].backward, stage_idx, microbatch_idx)

    def backward_input(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute the gradients of a stage's inputs."""
        self._start_backward(stage_idx, microbatch_idx)
        if self._observer is not None:
            self._observer.before_split_backward(self._positions[stage_idx])
        self._stages[stage_idx].backward_input(microbatch_idx)

    def backward_weight(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute the gradients of a stage's weights that are left."""
        self._run_weight_pass(self._stages[stage_idx].backward_weight, stage_idx, microbatch_idx)

    def _run_weight_pass(self, run: Callable[[int], None], stage_idx: int, microbatch_idx: int) -> None:
        self._start_backward(stage_idx, microbatch_idx)
        if self._observer is None:
            run(microbatch_idx)
            return
        self._num_weight_passes_left[stage_idx] -= 1
        is_last = self._num_weight_passes_left[stage_idx] == 0
        position = self._positions[stage_idx]
        self._observer.before_backward(position, is_last=is_last, is_split=self._is_split)
        run(microbatch_idx)
        self._observer.after_backward(position, is_last=is_last, is_split=self._is_split)

    def _start_backward(self, stage_idx: int, microbatch_idx: int) -> None:
        self._transport.flush()
        if self._observer is not None:
            self._observer.before_microbatch(microbatch_idx)
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
        self._activity = dist_context.activity
        self._logger = dist_context.logger
        self._group = stages[0].group
        self._stages = {stage.info.current_stage: stage for stage in stages}
        self._builder = program_builder
        self._is_split = splits_backward(program_builder, self._group.size())
        self._programs: dict[int, _RankProgram] = {}
        self._observer: BackwardObserver | None = None
        self._transport = build_transport(self._group, self._device)
        self._pool = BufferPool(self._device)
        self._failures = FailureBoard(self._group, self._device)
        self._has_failed = False
        self._stopwatch = Stopwatch(self._device)
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
            ValueError: The pack is empty, ranks have different numbers of microbatches, or two stages disagree on what
                they exchange. The last two are compared once for each number of microbatches.
            PipelineActionError: An action has failed on this rank; its cause is what the user's code has raised.
            PipelinePeerError: An action has failed on another rank.
            RuntimeError: A step has failed before.
        """
        if self._has_failed:
            raise RuntimeError("the pipeline has failed in an earlier step and can not go on: start the job anew.")
        program = self._program(inputs_microbatches, shared_microbatches)
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
            self._is_split,
        )
        self._run(program, run)
        self._pool.end_step()

    def _run(self, program: _RankProgram, run: _PackRun) -> None:
        action = program.actions[0]
        is_measured = self._stopwatch.is_running
        try:
            self._stopwatch.start_step()
            for action in program.actions:
                self._activity.place = action
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

    def _program(self, inputs: tuple[Any, ...], shared: tuple[Any, ...]) -> _RankProgram:
        num_microbatches = len(inputs)
        if num_microbatches not in self._programs:
            # For each new number of microbatches. In between, ranks are trusted to go on as they have begun.
            try:
                agree_on_pack(list(self._stages.values()), inputs, shared, self._group, self._logger)
            except RuntimeError as error:
                self._has_failed = True
                raise self._failures.peer_error("the comparison of packs before the step", error) from error
            check_pack(num_microbatches, len(shared))
            programs = self._builder.compose(num_microbatches=num_microbatches, pp_size=self._group.size())
            # The check takes seconds for programs of a million actions. What is wrong with a builder shows in small ones.
            if sum(map(len, programs.values())) <= MAX_VALIDATED_ACTIONS:
                validate_program(programs)
            own = programs[self._group.rank()]
            self._programs[num_microbatches] = _RankProgram(post_receives_early(own, self._transport.passes_ahead))
        return self._programs[num_microbatches]
