"""Forward passes of a pack: which outputs the task gets, and what is still in memory then."""

import dataclasses
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import d9d.loop.component.task_operator
from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.component import InferenceTaskOperator, PipelineStateHandler
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    InferenceTask,
    ProcessOutputsContext,
)
from d9d.pipelining.api import ActionTiming, BackwardObserver, PipelineSchedule
from d9d.pipelining.factory import PipelineScheduleInfo
from d9d.pipelining.offline import OfflinePipelineExecutor

FACTOR = 3.0


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(FACTOR))

    def forward(self, inputs: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs + shared


@dataclasses.dataclass
class State:
    target: torch.Tensor
    output: torch.Tensor | None = None


class Task(InferenceTask[float, torch.Tensor, torch.Tensor, torch.Tensor, State]):
    """Sees a number `b` as the input `b`, the shared value `10 b` and the target `-b`."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.targets: list[weakref.ref[torch.Tensor]] = []
        self.num_alive: list[tuple[int, int]] = []
        self.fails_at: float | None = None

    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[float]
    ) -> BuildForwardInputsResult[torch.Tensor, torch.Tensor, State]:
        target = torch.tensor(-ctx.batch)
        self.targets.append(weakref.ref(target))
        return BuildForwardInputsResult(
            input=torch.tensor(ctx.batch), shared=torch.tensor(10 * ctx.batch), state=State(target)
        )

    def process_outputs(self, ctx: ProcessOutputsContext[torch.Tensor, State]) -> None:
        output = ctx.pipeline_results
        assert (output.requires_grad, output.grad_fn, output.is_inference()) == (False, None, False)
        assert not torch.is_grad_enabled()
        if self.fails_at == float(ctx.state.target):
            raise ArithmeticError
        self.seen.append((float(output), float(ctx.state.target)))
        ctx.state.output = output
        self.outputs.append(weakref.ref(output))
        self.num_alive.append((num_alive(self.outputs), num_alive(self.targets)))


def num_alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(reference() is not None for reference in references)


class MiddleStage(PipelineSchedule[torch.Tensor, torch.Tensor, torch.Tensor]):
    """Sends its outputs to another rank, so that nothing is called here."""

    def __init__(self, at_step: Callable[[], None]) -> None:
        self.at_step = at_step

    def set_backward_observer(self, observer: BackwardObserver | None) -> None:
        raise NotImplementedError

    def record_next_step(self) -> None:
        raise NotImplementedError

    def take_timings(self) -> list[ActionTiming]:
        raise NotImplementedError

    def step(self, inputs_microbatches, shared_microbatches, callback) -> None:
        self.num_inputs = len(inputs_microbatches)
        self.at_step()


def operator_of(task: Task, schedule: PipelineSchedule | None = None) -> InferenceTaskOperator:
    info = PipelineScheduleInfo(
        schedule=schedule or OfflinePipelineExecutor(Scale(), do_backward=False),
        has_first_stage=schedule is None,
        has_last_stage=schedule is None,
    )
    return InferenceTaskOperator(DeviceMeshParameters().build(), task, info, PipelineStateHandler())


def test_outputs_come_with_the_states_of_their_microbatches():
    task = Task()
    operator = operator_of(task)
    operator.forward((1.0, 2.0))
    operator.forward((4.0,))
    # 3 b + 10 b, and -b.
    assert task.seen == [(13.0, -1.0), (26.0, -2.0), (52.0, -4.0)]
    assert torch.is_grad_enabled()


def test_a_processed_microbatch_leaves_nothing_behind():
    task = Task()
    operator = operator_of(task)
    operator.forward((1.0, 2.0, 4.0, 8.0))
    # One output at a time, and the states that are still to come, though the states hold the outputs.
    assert task.num_alive == [(1, 4), (1, 3), (1, 2), (1, 1)]
    assert (num_alive(task.outputs), num_alive(task.targets)) == (0, 0)


def test_a_rank_without_outputs_keeps_no_states():
    task = Task()
    alive: list[int] = []
    stage = MiddleStage(lambda: alive.append(num_alive(task.targets)))
    operator_of(task, stage).forward((1.0, 2.0, 4.0))
    assert (stage.num_inputs, alive, task.seen) == (3, [0], [])


def test_a_failed_pack_does_not_reach_into_the_next_one():
    task = Task()
    operator = operator_of(task)
    task.fails_at = -2.0
    with pytest.raises(ArithmeticError):
        operator.forward((1.0, 2.0, 4.0))
    assert torch.is_grad_enabled()
    assert num_alive(task.targets) == 0
    task.fails_at = None
    operator.forward((8.0,))
    assert task.seen == [(13.0, -1.0), (104.0, -8.0)]


def test_an_empty_pack_is_refused():
    with pytest.raises(ValueError, match="at least one microbatch"):
        operator_of(Task()).forward(())


def test_it_is_found_where_the_training_operator_is():
    assert d9d.loop.component.task_operator.InferenceTaskOperator is InferenceTaskOperator
