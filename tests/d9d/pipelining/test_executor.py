"""How packs run: what is told, measured, refused and freed on the way. What comes out is in test_pipeline_parity.py."""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.pipelining.actions import ActionBase, flat_actions
from d9d.pipelining.api import PipelineStageInfo
from d9d.pipelining.offline import OfflinePipelineExecutor
from tests.harness.pipelines import (
    SCHEDULES,
    TRAINING_SCHEDULES,
    ObserverJournal,
    Pipeline,
    ScaleStage,
    TransformerStage,
    build_pack,
    build_pipeline,
    numbered_inputs,
    program_of,
)

TRAINING = pytest.mark.parametrize("schedule", TRAINING_SCHEDULES)
EVERY = pytest.mark.parametrize("schedule", SCHEDULES)
SOME = pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name in ("1f1b_1", "zero_bubble_v", "inference") else pytest.mark.exhaustive)
        for name in SCHEDULES
    ],
)

# One stage, on one rank


class Scale(nn.Module):
    """Multiplies the input by a weight and adds what is shared; weighs the graphs that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.num_alive_at_forward: list[int] = []

    def forward(self, inputs: torch.Tensor, shared: float) -> torch.Tensor:
        self.num_alive_at_forward.append(sum(output() is not None for output in self.outputs))
        output = self.weight * inputs + shared
        self.outputs.append(weakref.ref(output))
        return output


INPUTS = (torch.tensor(1.0), torch.tensor(3.0), torch.tensor(5.0))
SHARED = (0.5, 0.5, 0.5)


def test_gradients_add_up_over_the_pack():
    model = Scale()
    OfflinePipelineExecutor(model, do_backward=True).step(INPUTS, SHARED, lambda output, _: output)
    # d(w * x + s) / dw = x, summed: 1 + 3 + 5.
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 9.0


def test_a_graph_is_freed_before_the_next_forward():
    model = Scale()
    OfflinePipelineExecutor(model, do_backward=True).step(INPUTS, SHARED, lambda output, _: output)
    assert model.num_alive_at_forward == [0, 0, 0]


def test_the_observer_hears_of_each_backward_before_it_runs():
    journal = ObserverJournal()

    def loss(output: torch.Tensor, index: int) -> torch.Tensor:
        journal.lines.append(f"loss {index}")
        return output

    executor = OfflinePipelineExecutor(Scale(), do_backward=True)
    executor.set_backward_observer(journal)
    executor.step(INPUTS, SHARED, loss)
    assert journal.lines == [
        *("loss 0", "pass of 0"),
        *("loss 1", "pass of 0"),
        *("loss 2", "last pass of 0", "0 done"),
    ]


def test_without_backward_the_callback_returns_nothing():
    model = Scale()
    seen: list[tuple[int, float]] = []
    executor = OfflinePipelineExecutor(model, do_backward=False)
    executor.step(INPUTS, SHARED, lambda output, index: seen.append((index, output.item())))
    assert seen == [(0, 2.5), (1, 6.5), (2, 10.5)]
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("inputs", "shared", "message"),
    [((), (), "at least one microbatch"), (INPUTS, SHARED[:2], "3 microbatch inputs came with 2 shared")],
)
def test_a_broken_pack_is_refused(inputs: Any, shared: Any, message: str):
    executor = OfflinePipelineExecutor(Scale(), do_backward=True)
    with pytest.raises(ValueError, match=message):
        executor.step(inputs, shared, lambda output, _: output)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda output: output.expand(2), ValueError, r"microbatch 0 has shape \(2,\)"),
        (lambda output: output.detach(), ValueError, "no parameter that requires a gradient"),
        (lambda output: output.item(), TypeError, "must be a tensor, got float"),
    ],
)
def test_a_loss_without_a_backward_pass_is_refused(
    loss: Callable[[torch.Tensor], Any], error: type[Exception], message: str
):
    executor = OfflinePipelineExecutor(Scale(), do_backward=True)
    with pytest.raises(error, match=message):
        executor.step(INPUTS, SHARED, lambda output, _: loss(output))


# Several stages, on several ranks


def run(pipeline: Pipeline, shapes: list[tuple[int, ...]]) -> None:
    """Run a step of `ScaleStage`s."""
    shared = tuple(range(len(shapes)))
    pipeline.executor.step(numbered_inputs(shapes), shared, lambda output, _: output.sum())


def actions_of_rank(schedule: str, num_microbatches: int) -> list[ActionBase]:
    return program_of(schedule, dist.get_world_size(), num_microbatches, dist.get_rank())


def journal_of(actions: list[ActionBase], positions: dict[int, int], *, is_split: bool) -> list[str]:
    """Work out from the text of a program what an observer should hear."""
    passes = [(text, int(text[0])) for text in map(str, flat_actions(actions)) if text[1] in "BIW"]
    lines: list[str] = []
    for index, (text, stage) in enumerate(passes):
        position = positions[stage]
        is_last = not any(later == stage for _, later in passes[index + 1 :])
        name = "first half" if text[1] == "I" else f"{'split ' if is_split else ''}pass"
        lines.append(f"{'last ' if is_last else ''}{name} of {position}")
        if is_last:
            lines.append(f"{position} done{' by halves' if is_split else ''}")
    return lines


@pytest.mark.world_size(2)
@TRAINING
def test_the_observer_hears_of_every_pass_and_the_last_one_of_each_stage(schedule: str):
    pipeline = build_pipeline(schedule, 2, ScaleStage)
    positions = {stage: position for position, stage in enumerate(sorted(pipeline.modules))}
    # Some schedules split nothing in small packs, and are split ones all the same.
    is_split = any("W" in str(action) for action in actions_of_rank(schedule, 9))
    for num_microbatches in (1, 2, 5):
        journal = ObserverJournal()
        pipeline.executor.set_backward_observer(journal)
        run(pipeline, [(4,)] * num_microbatches)
        assert journal.lines == journal_of(actions_of_rank(schedule, num_microbatches), positions, is_split=is_split)


@pytest.mark.world_size(4)
@TRAINING
def test_the_stages_of_a_rank_end_in_descending_order(schedule: str):
    pipeline = build_pipeline(schedule, 4, ScaleStage)
    for num_microbatches in (1, 3, 4, 8, 9):
        journal = ObserverJournal()
        pipeline.executor.set_backward_observer(journal)
        run(pipeline, [(2,)] * num_microbatches)
        ends = [line[:6] for line in journal.lines if line.endswith(("done", "halves"))]
        assert ends == [f"{position} done" for position in reversed(range(len(pipeline.modules)))]


@pytest.mark.world_size(2)
def test_nobody_is_told_any_more():
    pipeline = build_pipeline("1f1b_1", 2, ScaleStage)
    journal = ObserverJournal()
    pipeline.executor.set_backward_observer(journal)
    pipeline.executor.set_backward_observer(None)
    run(pipeline, [(4,)])
    assert journal.lines == []


@pytest.mark.world_size(2)
@EVERY
def test_each_action_of_a_recorded_step_is_measured_once(schedule: str):
    pipeline = build_pipeline(schedule, 2, ScaleStage)
    run(pipeline, [(4,)] * 3)
    assert pipeline.executor.take_timings() == []
    pipeline.executor.record_next_step()
    run(pipeline, [(4,)] * 3)
    timings = pipeline.executor.take_timings()
    measured = [action for action, _, _ in timings]
    # Receives may start earlier than the program says, all else keeps its place.
    program = actions_of_rank(schedule, 3)
    assert sorted(map(str, measured)) == sorted(map(str, program))
    assert without_receives(measured) == without_receives(program)
    times = [time for _, start, end in timings for time in (start, end)]
    assert times[0] >= 0
    assert times == sorted(times)
    run(pipeline, [(4,)] * 3)
    assert pipeline.executor.take_timings() == []


def without_receives(actions: list[ActionBase]) -> list[str]:
    return [text for text in map(str, actions) if "RECV" not in text]


@pytest.mark.world_size(2)
def test_an_empty_pack_on_one_rank_is_refused_by_all():
    pipeline = build_pipeline("1f1b_1", 2, ScaleStage)
    with pytest.raises(ValueError, match=r"different sizes: \[0, 4\] microbatches by pipeline rank"):
        run(pipeline, [(4,)] * (4 * dist.get_rank()))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["inputs", "shared", None])
def test_ranks_with_different_data_are_warned(kind: str | None):
    executor = build_pipeline("1f1b_1", 2, ScaleStage).executor
    warnings: list[str] = []
    executor._logger = logging.getLogger(f"pipeline with other {kind}")
    executor._logger.addFilter(lambda record: warnings.append(record.getMessage()) or False)
    own = float(dist.get_rank())
    inputs = (torch.full((4,), 1.0 + own * (kind == "inputs"), dtype=torch.float64),) * 2
    shared = (torch.tensor(own * (kind == "shared")),) * 2
    for _ in range(2):
        executor.step(inputs, shared, lambda output, _: output.sum())
    # Once, by the first rank.
    assert len(warnings) == (kind is not None and dist.get_rank() == 0)
    assert all("different inputs or shared data" in message for message in warnings)


@pytest.mark.world_size(2)
def test_a_rank_that_can_not_describe_its_pack_is_not_taken_for_other_data(monkeypatch: pytest.MonkeyPatch):
    pipeline = build_pipeline("1f1b_1", 2, ScaleStage)
    warnings: list[str] = []
    pipeline.executor._logger = logging.getLogger("pipeline with a rank that fails")
    pipeline.executor._logger.addFilter(lambda record: warnings.append(record.getMessage()) or False)
    if dist.get_rank() == 1:
        (module,) = pipeline.modules.values()
        monkeypatch.setattr(module, "stage_transfer_spec", lambda *args: 1 / 0)
    with pytest.raises(RuntimeError, match="division by zero"):
        run(pipeline, [(4,)] * 2)
    assert not warnings


@pytest.mark.world_size(4)
def test_ranks_with_packs_of_different_sizes_all_refuse():
    pipeline = build_pipeline("1f1b_1", 4, ScaleStage)
    size = 3 if dist.get_rank() == 2 else 4
    with pytest.raises(ValueError, match=r"different sizes: \[4, 4, 3, 4\] microbatches by pipeline rank"):
        run(pipeline, [(4,)] * size)


@pytest.mark.world_size(2)
def test_a_broken_pack_is_refused_by_a_pipeline_which_then_goes_on():
    pipeline = build_pipeline("1f1b_1", 2, ScaleStage)
    with pytest.raises(ValueError, match="at least one microbatch"):
        run(pipeline, [])
    with pytest.raises(ValueError, match="3 microbatch inputs came with 2 shared"):
        pipeline.executor.step(INPUTS, SHARED[:2], lambda output, _: output)
    run(pipeline, [(4,)] * 3)
    for module in pipeline.modules.values():
        assert module.weight.grad == 4 * (1 + 2 + 3)


# Memory


class Token:
    """Lives as long as the graph that it is put into."""


class Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: Token) -> torch.Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *grads, None


class TrackedStage(ScaleStage):
    """Counts the graphs of this rank that are alive when a forward pass starts."""

    graphs: "weakref.WeakSet[Token]"
    outputs: list[weakref.ref[torch.Tensor]]

    def __init__(self, info: PipelineStageInfo, counts: list[int]) -> None:
        super().__init__(info)
        self.counts = counts

    def forward(self, inputs: torch.Tensor, shared: Any) -> torch.Tensor:
        self.counts.append(len(self.graphs))
        token = Token()
        self.graphs.add(token)
        return Tracked.apply(super().forward(inputs, shared), token)  # pyright: ignore[reportReturnType]


def counts_of(actions: list[ActionBase]) -> list[int]:
    """Work out from the text of a program how many graphs are alive before each forward pass."""
    alive, counts = 0, []
    for text in map(str, flat_actions(actions)):
        stage, kind = text[0], text[1]
        if kind == "F":
            counts.append(alive)
            alive += 1
        # The first half of a split pass needs the graph no more, but the first stage has none: no input needs a gradient.
        elif kind == "B" or kind == ("W" if stage == "0" else "I"):
            alive -= 1
    return counts


@pytest.mark.world_size(4)
@TRAINING
def test_graphs_live_as_long_as_the_program_needs_them(schedule: str):
    TrackedStage.graphs, counts = weakref.WeakSet(), []
    pipeline = build_pipeline(schedule, 4, lambda info: TrackedStage(info, counts))
    for num_microbatches in (3, 12):
        counts.clear()
        run(pipeline, [(4,)] * num_microbatches)
        assert counts == counts_of(actions_of_rank(schedule, num_microbatches))
        assert not TrackedStage.graphs


@pytest.mark.world_size(4)
def test_1f1b_keeps_one_graph_for_each_rank_behind_it_and_one_more_to_hide_transfers():
    TrackedStage.graphs, counts = weakref.WeakSet(), []
    run(build_pipeline("1f1b_1", 4, lambda info: TrackedStage(info, counts)), [(4,)] * 16)
    assert 1 + max(counts) == [5, 4, 3, 1][dist.get_rank()]


@pytest.mark.world_size(2)
@EVERY
def test_an_output_is_gone_when_the_next_forward_pass_starts(schedule: str):
    outputs: list[weakref.ref[torch.Tensor]] = []

    class Watching(ScaleStage):
        def forward(self, inputs: torch.Tensor, shared: Any) -> torch.Tensor:
            # One is alive where the next stage is on the same rank, as its input shares the memory, not the tensor.
            assert [output() for output in outputs] == [None] * len(outputs)
            output = super().forward(inputs, shared)
            outputs.append(weakref.ref(output))
            return output

    run(build_pipeline(schedule, 2, Watching), [(4,)] * 6)


def num_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.world_size(2)
@SOME
def test_the_number_of_live_tensors_is_flat(schedule: str):
    pipeline = build_pipeline(schedule, 2, TransformerStage(is_tree=True))
    pack = build_pack(((2, 4), (1, 6), (3, 3), (2, 4)))
    counts: list[int] = []
    for step in range(1, 31):
        pipeline.executor.step(pack.inputs, pack.shared, pack.loss)
        if step % 3 == 0:
            counts.append(num_live_tensors())
    assert len(set(counts)) == 1, counts


@pytest.mark.world_size(2)
@SOME
def test_the_number_of_live_tensors_is_flat_with_ever_new_shapes(schedule: str):
    pipeline = build_pipeline(schedule, 2, ScaleStage)
    counts: list[int] = []
    for step in range(1, 31):
        run(pipeline, [(step, 3), (2, step), (step + 4,)])
        if step % 3 == 0:
            counts.append(num_live_tensors())
    assert len(set(counts)) == 1, counts
