"""Cutting a module into stages: names, balance, placeholders, and stages that compute what the module does."""

import copy
import dataclasses
import itertools
import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d9d.core.pytree import tree_map_only
from d9d.pipelining.transfer import BoundarySpec, flatten_output
from d9d_lightning.pipeline.call import CapturedCall
from d9d_lightning.pipeline.stage_cut import balanced_ranges
from d9d_lightning.pipeline.stages import (
    ForeignLayer,
    PipelineStages,
    build_stages,
    keep_stages,
    measure_layer_costs,
    plan_cut,
)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x, mask=None, *, scale=1.0):
        y = self.proj(x).tanh() * scale
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    def __init__(self, num_blocks=4, width=4):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, 3)

    def forward(self, tokens, mask=None, scale=1.0):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask, scale=scale)
        return self.head(x)


STACK = PipelineStages(layers=["embed", "blocks.*", "head"])


def linears(*sizes):
    return nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in sizes])


def sizes_of(ranges):
    return [end - start for start, end in ranges]


# Names


def test_children_of_a_sequential():
    names, ranges = plan_cut(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), PipelineStages(), 2)
    assert names == ("0", "1", "2")
    assert ranges == ((0, 2), (2, 3))


def test_patterns_in_calling_order():
    names, _ = plan_cut(Stack(2), STACK, 2)
    assert names == ("embed", "blocks.0", "blocks.1", "head")


def test_a_class_with_its_own_forward_needs_layers():
    with pytest.raises(ValueError, match=r'no plain nn.Sequential.*layers=\["embed", "blocks.\*", "head"\]'):
        plan_cut(Stack(), PipelineStages(), 2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Stack(), nn.Linear(3, 3)

    with pytest.raises(ValueError, match=r'layers=\["inner.embed", "inner.blocks.\*", "inner.head", "last"\]'):
        plan_cut(Outer(), PipelineStages(), 2)

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    with pytest.raises(ValueError, match=r"no plain nn\.Sequential"):
        plan_cut(Residual(nn.Linear(2, 2), nn.Linear(2, 2)), PipelineStages(), 2)


def test_all_problems_of_names_come_at_once():
    spec = PipelineStages(layers=["embd", "blocks.*", "blocks.0.proj", "blocks.1"], with_arguments=["block.*"])
    with pytest.raises(ValueError, match="can not cut") as error:
        plan_cut(Stack(), spec, 2)
    text = str(error.value)
    for part in (
        "'embd' matches no submodule; the nearest are 'embed'",
        "'blocks.0.proj' is inside of the layer 'blocks.0'",
        "'blocks.1' matches 'blocks.1', which an earlier pattern has named",
        "'block.*' matches no layer",
        "'embed.weight', 'head.weight', 'head.bias' of Stack would be used by nobody",
    ):
        assert part in text, (part, text)


@pytest.mark.parametrize(
    "options",
    [
        {"layers": "blocks.*"},
        {"boundaries": [1], "costs": [1.0, 2.0]},
        {"costs": [1.0, float("nan")]},
        {"costs": [-1.0]},
        {"balance": "flops"},
    ],
)
def test_options_that_can_not_be_meant(options):
    with pytest.raises(ValueError, match="PipelineStages"):
        PipelineStages(**options)


def test_a_skipped_module_without_parameters_is_warned_of():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)

    with pytest.warns(UserWarning, match="'drop' of Model"):
        plan_cut(Model(), PipelineStages(layers=["a", "b"]), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_cut(Model(), PipelineStages(layers=["a", "drop", "b"]), 2)


def test_lazy_layers_are_refused():
    with pytest.raises(ValueError, match="'1' has no shapes before its first call"):
        plan_cut(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), PipelineStages(), 2)


# Balance


def brute_force(costs, num_stages):
    """The smallest largest cost, and the smallest sum of squares with it."""
    best = None
    for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1):
        ends = (0, *cuts, len(costs))
        stages = [sum(costs[start:end]) for start, end in itertools.pairwise(ends)]
        found = max(stages), sum(stage * stage for stage in stages)
        best = found if best is None else min(best, found)
    return best


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_balance_is_the_optimum(costs, num_stages):
    ranges = balanced_ranges(costs, num_stages, [True] * len(costs))
    if num_stages > len(costs):
        assert ranges is None
        return
    assert [start for start, _ in ranges] == [0, *[end for _, end in ranges[:-1]]]
    assert ranges[-1][1] == len(costs)
    assert min(sizes_of(ranges)) >= 1
    stages = [sum(costs[start:end]) for start, end in ranges]
    assert (max(stages), sum(stage * stage for stage in stages)) == brute_force(costs, num_stages)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"), [(6, 4, [2, 2, 1, 1]), (5, 2, [3, 2]), (7, 3, [3, 2, 2])]
)
@pytest.mark.parametrize("cost", [1, 0.1])
def test_earlier_stages_are_the_larger_ones(num_layers, num_stages, sizes, cost):
    assert sizes_of(balanced_ranges([cost] * num_layers, num_stages, [True] * num_layers)) == sizes


def test_balance_by_parameters_layers_and_costs():
    module = linears(6, 1, 1, 1, 1, 1)
    # Parameters 6 1 1 1 1 1: the first layer alone weighs more than all others.
    assert plan_cut(module, PipelineStages(), 2)[1] == ((0, 1), (1, 6))
    assert plan_cut(module, PipelineStages(balance="layers"), 2)[1] == ((0, 3), (3, 6))
    assert plan_cut(module, PipelineStages(costs=[1, 1, 1, 1, 1, 9.5]), 2)[1] == ((0, 5), (5, 6))
    assert plan_cut(module, PipelineStages(boundaries=[2, 3]), 3)[1] == ((0, 2), (2, 3), (3, 6))
    assert plan_cut(module, PipelineStages(), 1)[1] == ((0, 6),)


@pytest.mark.parametrize(
    ("spec", "num_stages", "message"),
    [
        (PipelineStages(), 7, "can not fill 7 stages: use 1 to 6 stages"),
        (PipelineStages(), 0, r"num_stages \(0\)"),
        (PipelineStages(), 5, "only 4 of 6 layers have parameters.*use 1 to 4 stages.*balance='layers'"),
        (PipelineStages(costs=[1.0]), 2, "costs has 1 values, but there are 6 layers"),
        (PipelineStages(boundaries=[1]), 3, r"make 2 stages, but the pipeline has 3: give 2"),
        (PipelineStages(boundaries=[3, 3]), 3, "leave a stage empty.*from 1 to 5"),
        (PipelineStages(boundaries=[0]), 2, "leave a stage empty"),
        (PipelineStages(boundaries=[6]), 2, "leave a stage empty"),
    ],
)
def test_stages_that_can_not_be_filled(spec, num_stages, message):
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.raises(ValueError, match=message):
        plan_cut(module, spec, num_stages)


def test_every_stage_has_parameters_unless_layers_count():
    module = nn.Sequential(nn.Linear(1, 1), *[nn.ReLU() for _ in range(5)], nn.Linear(1, 1))
    _, ranges = plan_cut(module, PipelineStages(), 2)
    assert ranges[0][0] == 0
    assert 1 <= ranges[0][1] <= 6
    assert sizes_of(plan_cut(module, PipelineStages(balance="layers"), 7)[1]) == [1] * 7


# Ties


def test_tied_layers_of_different_stages_are_refused():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    with pytest.raises(ValueError, match=r"0.weight \(stage 0\) and 2.weight \(stage 1\) are one tensor.*boundaries="):
        plan_cut(module, PipelineStages(), 2)
    module[1].weight, module[2].weight = module[0].weight, nn.Parameter(torch.ones(3, 3))
    assert plan_cut(module, PipelineStages(boundaries=[2]), 2)[1] == ((0, 2), (2, 3))


def test_a_layer_that_is_called_twice():
    shared = nn.Linear(3, 3)
    module = nn.Sequential(nn.Linear(3, 3), shared, shared, nn.Linear(3, 3))
    names, ranges = plan_cut(module, PipelineStages(boundaries=[3]), 2)
    assert names == ("0", "1", "2", "3")
    assert ranges == ((0, 3), (3, 4))
    with pytest.raises(ValueError, match=r"1.weight \(stage 0\) and 2.weight \(stage 1\)"):
        plan_cut(module, PipelineStages(boundaries=[2]), 2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

    spec = PipelineStages(layers=["a", "act", "b", "act"])
    assert plan_cut(Model(), spec, 2) == (("a", "act", "b", "act"), ((0, 2), (2, 4)))
    with pytest.raises(ValueError, match=r"a\.weight is in the stages 0, 1"):
        plan_cut(Model(), PipelineStages(layers=["a", "act", "b", "a"]), 2)


def test_ties_to_the_outside():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Stack(2)
            self.again = self.model  # a second name of the whole is no tie
            self.out = nn.Linear(4, 7, bias=False)

    root = Root()
    plan_cut(root.model, STACK, 2, root=root)
    root.out.weight = root.model.embed.weight
    with pytest.raises(ValueError, match=r"model.embed.weight \(stage 0\) and out.weight \(outside of the pipelined"):
        plan_cut(root.model, STACK, 2, root=root)
    plan_cut(root.model, STACK, 1, root=root)


def test_shared_buffers_are_ties():
    norm = nn.BatchNorm1d(3, affine=False)
    module = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm)
    with pytest.raises(ValueError, match=r"1.running_mean .* and 3.running_mean"):
        plan_cut(module, PipelineStages(), 2)


# Placeholders


def test_placeholders_keep_names_and_lengths():
    module = Stack(4)
    whole = module.state_dict()
    names, ranges = plan_cut(module, STACK, 3)
    own = module.blocks[2]
    live = keep_stages(module, names, ranges, [1])
    kept = names[slice(*ranges[1])]
    assert list(module.state_dict()) == [key for key in whole if key.startswith(tuple(f"{name}." for name in kept))]
    assert len(module.blocks) == 4
    assert module.blocks[2] is own
    assert [isinstance(layer, ForeignLayer) for layer in live] == [name not in kept for name in names]
    assert live[0] is module.embed
    assert not list(module.embed.parameters())
    module.eval()
    assert not module.embed.training
    with pytest.raises(RuntimeError, match="layer 'embed' is in stage 0 on another"):
        module.embed(torch.zeros(1))
    with pytest.raises(AttributeError, match=r"layer 'head' is in stage 2 on another pipeline rank.*'weight'"):
        _ = module.head.weight
    assert copy.deepcopy(module.head).layer_name == "head"


def test_a_layer_of_two_stages_stays_where_one_of_them_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

    module = Model()
    keep_stages(module, ("a", "act", "b", "act"), ((0, 2), (2, 4)), [1])
    assert isinstance(module.act, nn.ReLU)
    assert isinstance(module.a, ForeignLayer)


# Stages


def run_stages(module, spec, num_stages, call, own_of_rank=None):
    """Run copies of a module cut for each rank, one after another, with what crosses held against the specs."""
    names, ranges = plan_cut(module, spec, num_stages)
    ranks = [build_stages(copy.deepcopy(module), spec, names, ranges, [stage]) for stage in range(num_stages)]
    stages = [stage for (stage,) in ranks]
    value = call
    for stage in stages:
        if not stage.info.is_current_stage_first:
            # Every rank knows what comes in, and says the same of it as the sender.
            incoming = BoundarySpec(stage.stage_transfer_spec(call, boundary("incoming")))
            outgoing = BoundarySpec(
                stages[stage.info.current_stage - 1].stage_transfer_spec(call, boundary("outgoing"))
            )
            assert incoming.describe() == outgoing.describe()
            incoming.sendable_leaves(*flatten_output(value))
        value = stage(value, call)
    return value, stages


def boundary(name):
    from d9d.pipelining.api import StageBoundary

    return StageBoundary(name)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_compute_what_the_module_does(num_stages):
    torch.manual_seed(0)
    module = Stack(2).double()
    tokens = torch.randint(7, (2, 5))
    mask = torch.rand(2, 5, 1, dtype=torch.float64)
    for call in (
        CapturedCall((tokens,), {}),
        CapturedCall((tokens, mask), {}),
        CapturedCall((tokens,), {"mask": mask, "scale": 0.5}),
        CapturedCall((), {"tokens": tokens, "scale": 2.0}),
    ):
        expected = module(*call.args, **call.kwargs)
        output, stages = run_stages(module, STACK, num_stages, call)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        module.zero_grad()
        expected.square().sum().backward()
        output.square().sum().backward()
        own = [parameter for stage in stages for parameter in stage.parameters()]
        for mine, theirs in zip(own, module.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


@dataclasses.dataclass
class State:
    x: torch.Tensor
    trace: dict
    num_layers: int = 0


class StateLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, state):
        if isinstance(state, torch.Tensor):
            state = State(state, {"first": state.sum(-1)})
        return State(self.proj(state.x), {**state.trace, "last": state.x[:, :1]}, state.num_layers + 1)


class TupleLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, pair):
        x, rest = pair if isinstance(pair, tuple) else (pair, [None, "tag"])
        return self.proj(x), rest


@pytest.mark.parametrize("layer", [StateLayer, TupleLayer])
def test_structures_go_through_stages(layer):
    module = nn.Sequential(*[layer() for _ in range(4)])
    call = CapturedCall((torch.randn(5, 3),), {})
    output, _ = run_stages(module, PipelineStages(), 4, call)
    expected = module(*call.args)
    assert tree_map_only(torch.Tensor, torch.Tensor.tolist, output) == tree_map_only(
        torch.Tensor, torch.Tensor.tolist, expected
    )


def test_activations_in_place_behind_a_cut():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    spec = PipelineStages(boundaries=[1])
    names, ranges = plan_cut(module, spec, 2)
    call = CapturedCall((torch.randn(5, 3),), {})
    expected = module(*call.args)
    first, second = build_stages(module, spec, names, ranges, [0, 1])
    received = first(call, call).detach().requires_grad_()
    before = received.detach().clone()
    output = second(received, call)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert torch.equal(received.detach(), before)
    assert received.grad is not None


def test_stages_run_in_the_given_context():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names, ranges = plan_cut(module, PipelineStages(), 2)
    first, second = build_stages(
        module, PipelineStages(), names, ranges, [0, 1], run_in=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    call = CapturedCall((torch.randn(2, 3),), {})
    sent = first(call, call)
    assert sent.dtype is torch.bfloat16
    assert first.stage_transfer_spec(call, boundary("outgoing")).dtype is torch.bfloat16
    assert second(sent, call).dtype is torch.bfloat16


# Further arguments


class Wants(nn.Module):
    """Reports what it was called with by adding it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


class WantsBias(Wants):
    def forward(self, x, bias):
        return x + bias + self.weight


class WantsOther(Wants):
    def forward(self, x, other=0.0):
        return x + 10 * other + self.weight


class WantsAll(Wants):
    def forward(self, x, *args, **kwargs):
        return x + 100 * len(args) + 1000 * sum(map(float, kwargs.values())) + self.weight


class Chain(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, shift=0.0, other=None, **more):
        raise NotImplementedError


class Variadic(Chain):
    def forward(self, x, *args, **kwargs):
        raise NotImplementedError


def chained(module, *args, with_arguments=None, **kwargs):
    spec = PipelineStages(layers=["layers.*"], with_arguments=with_arguments)
    names, ranges = plan_cut(module, spec, 1)
    (stage,) = build_stages(module, spec, names, ranges, [0])
    call = CapturedCall((torch.zeros(()), *args), kwargs)
    return stage(call, call).item()


def test_arguments_go_by_name_and_position():
    # "bias" is required, so the second argument of the call fills it although it has another name there.
    assert chained(Chain(WantsBias(), WantsOther()), 3.0, other=2.0) == 3 + 20
    assert chained(Chain(WantsBias()), 3.0) == 3
    # Without a name, by position to all that take as many.
    assert chained(Variadic(WantsBias(), WantsOther(), nn.Identity(), WantsAll()), 3.0) == 3 + 30 + 100
    # The default of the module's own forward is what it would hand on.
    assert chained(Chain(WantsAll(), WantsOther()), other=1.0, extra=2.0) == 1000 * 3 + 10


def test_chosen_layers_get_all_arguments():
    module = Chain(WantsOther(), WantsOther(), WantsAll())
    assert chained(module, 3.0, with_arguments=["layers.1"]) == 30
    assert chained(module, 3.0, with_arguments=["layers.[12]"]) == 30 + 100


def test_an_optional_argument_of_another_name_is_not_guessed():
    module = Chain(nn.LSTM(3, 3), WantsOther())
    with pytest.raises(TypeError, match=r"argument 1 \('shift'\) reaches no layer.*with_arguments"):
        chained(module, torch.ones(3))


@pytest.mark.parametrize(
    ("layers", "args", "kwargs", "message"),
    [
        ([WantsOther], (), {"mask": 1.0}, r"keyword argument \('mask'\) reaches no layer"),
        ([WantsBias], (), {}, "layer 'layers.0' needs an argument 'bias'"),
        ([WantsOther], (1.0, 2.0, 3.0), {}, "does not fit Chain.forward"),
    ],
)
def test_calls_that_do_not_fit(layers, args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        chained(Chain(*[layer() for layer in layers]), *args, **kwargs)


def test_the_value_may_be_a_keyword():
    module = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    names, ranges = plan_cut(module, PipelineStages(), 1)
    (stage,) = build_stages(module, PipelineStages(), names, ranges, [0])
    x = torch.randn(1, 2)
    call = CapturedCall((), {"input": x})
    torch.testing.assert_close(stage(call, call), module(x))
    for wrong in (CapturedCall((), {}), CapturedCall((x, x), {})):
        with pytest.raises(TypeError, match="pipelined call"):
            stage(wrong, wrong)


# Costs


class Noisy(nn.Module):
    def __init__(self, num_products):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.num_products = num_products

    def forward(self, x):
        random.random()
        x = x + torch.rand_like(x)
        for _ in range(self.num_products):
            x = x @ self.weight
        return x


def test_measured_costs_leave_no_trace():
    module = nn.Sequential(Noisy(1), nn.BatchNorm1d(64), nn.ReLU(inplace=True), Noisy(60))
    before = copy.deepcopy(module.state_dict())
    gradient = module[0].weight.grad = torch.ones(64, 64)
    x = torch.randn(64, 64)
    states = torch.get_rng_state(), random.getstate()
    costs = measure_layer_costs(module, PipelineStages(), x, num_repeats=3)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert module[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(64, 64))
    assert module[3].weight.grad is None
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert len(costs) == 4
    assert costs[3] > 2 * costs[0] > 0
    assert plan_cut(module, PipelineStages(costs=costs), 2)[1] == ((0, 3), (3, 4))
