"""What crosses the boundaries of a stage, and what a stage keeps: against plain autograd on one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from d9d.core.types import TensorSpec
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from d9d.pipelining.failure import PipelineActionError, PipelinePeerError
from d9d.pipelining.p2p import Transport, build_transport
from tests.harness.parity import FP64_EXACT, assert_close_tree
from tests.harness.pipelines import (
    TRAINING_SCHEDULES,
    ScaleStage,
    build_pipeline,
    build_whole,
    numbered_inputs,
    run_whole,
    told,
)

FLOATS = TensorSpec((2, 3), torch.float64)


def floats(shape: tuple[int, ...] = (2, 3)) -> TensorSpec:
    return TensorSpec(shape, torch.float64)


@dataclasses.dataclass
class Node:
    x: Any
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A tree that each stage makes of a tensor (2, 3), and the next one makes such a tensor of."""

    make: Callable[[torch.Tensor], Any]
    spec: Any
    use: Callable[[Any], torch.Tensor]
    is_passed_on: bool = False
    """Stages in the middle return what they get."""

    def __call__(self, info: PipelineStageInfo) -> nn.Module:
        return BoundaryStage(info, self)


class BoundaryStage(nn.Module):
    def __init__(self, info: PipelineStageInfo, boundary: Boundary) -> None:
        super().__init__()
        self.info, self.boundary = info, boundary
        self.weight = nn.Parameter(torch.full((2, 3), 1.0 + info.current_stage, dtype=torch.float64))

    def forward(self, inputs: Any, shared: Any) -> Any:
        is_first, is_last = self.info.is_current_stage_first, self.info.is_current_stage_last
        if self.boundary.is_passed_on and not is_first and not is_last:
            return inputs
        x = inputs if is_first else self.boundary.use(inputs)
        x = (x * self.weight).sin()
        return x if is_last else self.boundary.make(x)

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        return self.boundary.spec


BOUNDARIES = {
    "nest": Boundary(
        make=lambda x: Node({"a": (x, x.exp())}, Node(x + 1)),
        spec=Node({"a": (FLOATS, FLOATS)}, Node(FLOATS)),
        use=lambda tree: tree.x["a"][0] * tree.x["a"][1] + tree.rest.x,
    ),
    "integers": Boundary(
        make=lambda x: (x, torch.tensor([2, 0])),
        spec=(FLOATS, TensorSpec((2,), torch.int64)),
        use=lambda pair: pair[0][:, pair[1][:1]].expand(2, 3),
    ),
    "floats without gradient": Boundary(
        make=lambda x: {"mask": x.detach().sign(), "x": x, "table": torch.arange(3, dtype=torch.float32)},
        spec={"mask": FLOATS, "x": FLOATS, "table": TensorSpec((3,), torch.float32)},
        use=lambda tree: tree["x"] * tree["mask"] + tree["table"],
    ),
    "booleans": Boundary(
        make=lambda x: (x > 0.5, x),
        spec=(TensorSpec((2, 3), torch.bool), FLOATS),
        use=lambda pair: pair[1].masked_fill(pair[0], 0.0),
    ),
    "unused": Boundary(make=lambda x: [x, x.exp()], spec=[FLOATS, FLOATS], use=lambda pair: pair[0]),
    "unused, of one element": Boundary(
        make=lambda x: [x, x.sum(), x[:1, :1]], spec=[FLOATS, floats(()), floats((1, 1))], use=lambda pair: pair[0]
    ),
    "constants": Boundary(
        make=lambda x: (x, "relu", 0.5, None),
        spec=(FLOATS, "relu", 0.5, None),
        use=lambda tree: getattr(tree[0], tree[1])() * tree[2],
    ),
    "not contiguous": Boundary(
        make=lambda x: (x.t(), x[:, ::2], x[:, :1].expand(2, 4)),
        spec=(floats((3, 2)), floats((2, 2)), floats((2, 4))),
        use=lambda tree: tree[0].t() * tree[1].sum() + tree[2][:, :3],
    ),
    "no dimension and no element": Boundary(
        make=lambda x: (x.sum(), x[:0], x),
        spec=(floats(()), floats((0, 3)), FLOATS),
        use=lambda tree: tree[0] + tree[1].sum() + tree[2],
    ),
    "one tensor twice": Boundary(
        make=lambda x: (x, x), spec=(FLOATS, FLOATS), use=lambda pair: pair[0] * pair[1].exp()
    ),
    "half precision": Boundary(
        make=lambda x: (x.bfloat16(), x),
        spec=(TensorSpec((2, 3), torch.bfloat16), FLOATS),
        use=lambda pair: pair[0].double() + pair[1],
    ),
}

SOME_SCHEDULES = ("gpipe", "looped_bfs_2", "1f1b_1", "zero_bubble_1", "zero_bubble_v", "dual_pipe_v")


def check_stages(schedule: str, pp_size: int, build_stage: Callable[[PipelineStageInfo], nn.Module]) -> None:
    """Run three microbatches and compare outputs and gradients; a stage without gradients shall have none."""
    pipeline = build_pipeline(schedule, pp_size, build_stage)
    inputs = tuple(tensor / 3 for tensor in numbered_inputs([(2, 3)] * 3))
    outputs: dict[int, torch.Tensor] = {}

    def loss(output: torch.Tensor, index: int) -> torch.Tensor:
        outputs[index] = output.detach()
        return output.square().sum()

    pipeline.executor.step(inputs, (None,) * 3, loss)
    whole = build_whole(pipeline.num_stages, build_stage)
    expected = {index: run_whole(whole, each, None) for index, each in enumerate(inputs)}
    sum(output.square().sum() for output in expected.values()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    gradients = {s: {name: p.grad for name, p in m.named_parameters()} for s, m in pipeline.modules.items()}
    expected_gradients = {s: {name: p.grad for name, p in whole[s].named_parameters()} for s in pipeline.modules}
    expected_outputs = {k: output.detach() for k, output in expected.items()} if pipeline.has_last_stage else {}
    assert_close_tree(outputs, expected_outputs, atol=FP64_EXACT, rtol=FP64_EXACT)
    assert_close_tree(gradients, expected_gradients, atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", BOUNDARIES)
def test_what_can_cross_a_boundary(name: str):
    for schedule in SOME_SCHEDULES:
        with told(schedule):
            check_stages(schedule, 2, BOUNDARIES[name])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_stage_may_return_its_input(name: str):
    for schedule in ("looped_bfs_2", "zero_bubble_2", "zero_bubble_v", "dual_pipe_v"):
        with told(schedule):
            check_stages(schedule, 2, dataclasses.replace(BOUNDARIES[name], is_passed_on=True))


@pytest.mark.world_size(4)
def test_what_can_cross_four_ranks():
    for name, schedule in zip(BOUNDARIES, SOME_SCHEDULES * 2, strict=False):
        with told(f"{name}, {schedule}"):
            check_stages(schedule, 4, BOUNDARIES[name])


class FrozenStage(ScaleStage):
    """Freezes its weight if it is one of the given stages."""

    def __init__(self, info: PipelineStageInfo, frozen: set[int]) -> None:
        super().__init__(info)
        self.requires_grad_(info.current_stage not in frozen)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}, {1, 2}], ids=str)
def test_frozen_stages(frozen: set[int]):
    for schedule in ("gpipe", "zero_bubble_1", "zero_bubble_v"):
        with told(schedule):
            check_stages(schedule, 4, lambda info: FrozenStage(info, frozen))


class BiasStage(ScaleStage):
    """Adds a view of its bias, whose gradient may thus be the memory of the gradient that the stage has received."""

    def __init__(self, info: PipelineStageInfo) -> None:
        super().__init__(info)
        self.bias = nn.Parameter(torch.arange(6, dtype=torch.float64) / 10)

    def forward(self, inputs: torch.Tensor, shared: Any) -> torch.Tensor:
        output = inputs + self.bias.view(2, 3)
        return output.sin() if self.info.is_current_stage_last else output


@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", TRAINING_SCHEDULES)
def test_gradients_of_weights_may_share_memory_with_what_was_received(schedule: str):
    check_stages(schedule, 4, BiasStage)


# What is sent


class CountingTransport:
    """A transport that writes down the sizes of what it sends, by peer."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.receive, self.flush, self.finish = transport.receive, transport.flush, transport.finish
        self.passes_ahead = transport.passes_ahead
        self.sent: list[tuple[int, list[tuple[int, ...]]]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.sent.append((peer, [tuple(tensor.shape) for tensor in tensors]))
        self._transport.send(tensors, peer, tag)


def count_transfers(monkeypatch: pytest.MonkeyPatch) -> list[CountingTransport]:
    """Have the pipelines that are built from now on count."""
    transports: list[CountingTransport] = []

    def build(group: Any, device: torch.device) -> CountingTransport:
        transports.append(CountingTransport(build_transport(group, device)))
        return transports[-1]

    monkeypatch.setattr("d9d.pipelining.executor.build_transport", build)
    return transports


class SharingStage(ScaleStage):
    def forward(self, inputs: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight + shared.sum()


@pytest.mark.world_size(4)
def test_boundary_tensors_are_sent_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    transports = count_transfers(monkeypatch)
    pipeline = build_pipeline("1f1b_1", 4, SharingStage)
    (transport,) = transports
    inputs = numbered_inputs([(4,), (6,), (3,)])
    shared = tuple(torch.ones(50, requires_grad=True) for _ in inputs)
    for step in range(2):
        transport.sent.clear()
        pipeline.executor.step(inputs, shared, lambda output, _: output.sum())
        (rank,) = pipeline.modules
        # Ahead of the first microbatch: which of the tensors (one) have gradients.
        first = [(1,), (4,)] if step == 0 else [(4,)]
        assert [shapes for peer, shapes in transport.sent if peer == rank + 1] == [first, [(6,)], [(3,)]][
            : 3 * (rank < 3)
        ]
        assert [shapes for peer, shapes in transport.sent if peer == rank - 1] == [[(4,)], [(6,)], [(3,)]][
            : 3 * (rank > 0)
        ]
        assert {peer for peer, _ in transport.sent} <= {rank - 1, rank + 1}
    assert [each.grad is None for each in shared] == [False] * 3


@pytest.mark.world_size(2)
def test_no_gradient_is_sent_where_none_is_needed(monkeypatch: pytest.MonkeyPatch):
    transports = count_transfers(monkeypatch)
    pipeline = build_pipeline("gpipe", 2, lambda info: FrozenStage(info, {0}))
    pipeline.executor.step(numbered_inputs([(4,)]), (None,), lambda output, _: output.sum())
    assert transports[0].sent == ([(1, [(1,), (4,)])] if 0 in pipeline.modules else [(0, [])])


@pytest.mark.world_size(2)
def test_stages_of_one_rank_exchange_without_transfers(monkeypatch: pytest.MonkeyPatch):
    transports = count_transfers(monkeypatch)
    pipeline = build_pipeline("zero_bubble_v", 2, ScaleStage)
    pipeline.executor.step(numbered_inputs([(4,)] * 2), (None,) * 2, lambda output, _: output.sum())
    # Over 0 -> 1 and 2 -> 3 there are two microbatches each, and as many gradients; between 1 and 2 none.
    assert len(transports[0].sent) == 4


# What does not fit


class WrongStage(ScaleStage):
    """Does something on one stage at the second microbatch (or at the one given) that others do not expect."""

    def __init__(self, info: PipelineStageInfo, at: int, wrong: Callable[[torch.Tensor], Any], microbatch: int) -> None:
        super().__init__(info)
        self.wrong = wrong if info.current_stage == at else None
        self.microbatch = microbatch

    def forward(self, inputs: torch.Tensor, shared: int) -> Any:
        output = super().forward(inputs, shared)
        return self.wrong(output) if self.wrong is not None and shared == self.microbatch else output


def first_error(pipeline: Any, num_microbatches: int = 4) -> BaseException:
    """Run a step that fails."""
    inputs = numbered_inputs([(2, 3)] * num_microbatches)
    with pytest.raises((PipelineActionError, PipelinePeerError)) as info:
        pipeline.executor.step(inputs, tuple(range(num_microbatches)), lambda output, _: output.sum())
    return info.value


WRONG_OUTPUTS = {
    "shape": (lambda x: x[:, :2], ValueError, r"float64 (2, 2)"),
    "dtype": (lambda x: x.float(), ValueError, r"float32 (2, 3)"),
    "structure": (lambda x: (x,), ValueError, r"[0]: float64 (2, 3)"),
    "no tensor": (lambda x: None, ValueError, "produced"),
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_an_output_that_does_not_fit_its_spec_is_an_error_of_the_sender(name: str):
    wrong, cause, produced = WRONG_OUTPUTS[name]
    for microbatch in (0, 2):
        pipeline = build_pipeline("1f1b_1", 4, lambda info: WrongStage(info, 1, wrong, microbatch))  # noqa: B023
        error = first_error(pipeline)
        assert f"action 1F{microbatch} failed" in str(error)
        assert produced in str(error)
        assert "specified: float64 (2, 3)" in str(error)
        assert isinstance(error, PipelineActionError if 1 in pipeline.modules else PipelinePeerError)
        if 1 in pipeline.modules:
            assert type(error.__cause__) is cause


@pytest.mark.world_size(2)
def test_a_gradient_that_comes_later_is_an_error():
    class Late(FrozenStage):
        def forward(self, inputs: torch.Tensor, shared: int) -> torch.Tensor:
            self.requires_grad_(self.info.current_stage == 1 or shared == 2)
            return super().forward(inputs, shared)

    error = first_error(build_pipeline("1f1b_1", 2, lambda info: Late(info, set())))
    assert "action 0F2 failed" in str(error)
    assert "requires_grad then: [False], now: [True]" in str(error)


@pytest.mark.world_size(2)
def test_a_gradient_that_is_missing_later_is_none():
    class Sometimes(FrozenStage):
        def forward(self, inputs: torch.Tensor, shared: None) -> torch.Tensor:
            output = super().forward(inputs, shared)
            return output.detach() if self.info.current_stage == 0 and inputs[0, 0] > 0.5 else output

    for schedule in ("gpipe", "zero_bubble_1"):
        check_stages(schedule, 2, lambda info: Sometimes(info, set()))


class TwoSpecs(ScaleStage):
    """Gives another spec for what comes in, from some microbatch on, than the stage before for what goes out."""

    def __init__(self, info: PipelineStageInfo, incoming: Any, microbatch: int) -> None:
        super().__init__(info)
        self.incoming, self.microbatch = incoming, microbatch

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        is_wrong = boundary == StageBoundary.incoming and pipeline_input[0, 0] > self.microbatch
        return self.incoming if is_wrong else super().stage_transfer_spec(pipeline_input, boundary)


OTHER_SPECS = {
    "smaller": floats((2, 2)),
    "larger": floats((3, 3)),
    "transposed": floats((3, 2)),
    "type": TensorSpec((2, 3), torch.int64),
    "more tensors": (FLOATS, FLOATS),
    "no tensors": (1,),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", OTHER_SPECS)
@pytest.mark.parametrize("schedule", ["1f1b_1", "inference"])
@pytest.mark.parametrize("microbatch", [0, 2])
def test_two_sides_with_different_specs_are_refused_by_both(schedule: str, name: str, microbatch: int):
    pipeline = build_pipeline(schedule, 2, lambda info: TwoSpecs(info, OTHER_SPECS[name], microbatch))
    inputs = numbered_inputs([(2, 3)] * 4)
    with pytest.raises(ValueError, match=rf"stage 1 expects for microbatch {microbatch}, by") as info:
        pipeline.executor.step(inputs, tuple(range(4)), lambda output, _: output.sum())
    assert "StageBoundary.outgoing: float64 (2, 3)" in str(info.value)
    assert "StageBoundary.incoming: " in str(info.value)


# What a module keeps


class KeepingStage(ScaleStage):
    """Passes on a counter that it changes in place for each microbatch."""

    def __init__(self, info: PipelineStageInfo) -> None:
        super().__init__(info)
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.seen: list[float] = []

    def forward(self, inputs: Any, shared: int) -> Any:
        if self.info.is_current_stage_first:
            inputs = (inputs, self.count.add_(1))
        x, count = inputs
        self.seen.append(float(count))
        return x * self.weight if self.info.is_current_stage_last else (x * self.weight, count)

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        return floats(tuple(pipeline_input.shape)), floats((1,))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b_1", "zero_bubble_v", "inference"])
def test_a_tensor_that_the_module_changes_later_arrives_as_it_was(schedule: str):
    pipeline = build_pipeline(schedule, 2, KeepingStage)
    pipeline.executor.step(numbered_inputs([(2, 3)] * 8), tuple(range(8)), lambda output, _: output.sum())
    for module in pipeline.modules.values():
        assert module.seen == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
