"""A backward pass in two halves gives what a whole one gives, and the first half does less."""

import collections
import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.pipelining import weight_gradients
from d9d.pipelining.backward import stage_backward_full, stage_backward_input, stage_backward_weight
from d9d.pipelining.weight_gradients import MAX_PENDING_BYTES

TOLERANCE = 1e-12
"""Of a sum in another order, in double precision."""
SPLIT_ORDER = ("I0", "I1", "W0", "I2", "W1", "W2")
WIDTH = 6

Outputs = tuple[torch.Tensor, ...]


def normal_inputs(*shape: int) -> Callable[[], list[torch.Tensor | None]]:
    return lambda: [torch.randn(*shape, dtype=torch.float64, requires_grad=True)]


_ROWS = normal_inputs(4, WIDTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[[], nn.Module]
    forward: Callable[..., Outputs] = lambda module, *inputs: (module(*inputs),)
    inputs: Callable[[], list[torch.Tensor | None]] = _ROWS
    is_exact: bool = True
    """Whether the halves do the same arithmetic in the same order as the whole."""


class Holder(nn.Module):
    """Parameters for a case whose forward pass is a function."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class PlainProduct(torch.autograd.Function):
    """Computes both gradients whatever is wanted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        return grad @ weight.t() * ctx.scale, None, x.t() @ grad * ctx.scale


class AskingProduct(PlainProduct):
    """Computes what is wanted, and notes what that was."""

    calls: ClassVar[collections.Counter[str]] = collections.Counter()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (x, weight), grad_x, grad_weight = grads, ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0] and GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.inputs):
            AskingProduct.calls["inputs"] += 1
            grad_x = grad @ weight.t() * ctx.scale
        if ctx.needs_input_grad[2] and GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.weight):
            AskingProduct.calls["weight"] += 1
            grad_weight = x.t() @ grad * ctx.scale
        return grad_x, None, grad_weight


class Pair(torch.autograd.Function):
    """Two outputs, of which one may get no gradient, and a gradient of the second weight that is always None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, unused: torch.Tensor) -> Outputs:
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (product_grad, sum_grad), (x, weight), grad_weight = grads, ctx.saved_tensors, None
        if GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.weight):
            grad_weight = (x * product_grad + sum_grad).sum(0)
        return weight * product_grad + sum_grad, grad_weight, None


def mlp(depth: int = 3) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)])


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def hooked(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).register_hook(lambda grad: grad * 3)
    return module


def with_hook(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    tensor.register_hook(lambda grad: grad * factor)
    return tensor


def in_place(module: Any, x: torch.Tensor) -> Outputs:
    y = module[0](x) * 2
    y[:, 1:3].mul_(2)
    y.add_(module[1](x)).relu_()
    left, right = y.split(3, dim=1)
    return (torch.cat([right, left.exp()], dim=1),)


def several_outputs(module: Any, x: torch.Tensor) -> Outputs:
    y = module(x)
    penalty = sum(parameter.square().sum() for parameter in module.parameters())
    assert isinstance(penalty, torch.Tensor)
    return y, x, y.detach(), y, penalty, y.relu()


def autocast_forward(module: nn.Module, x: torch.Tensor) -> Outputs:
    with torch.autocast("cpu", torch.bfloat16):
        return (module(module(x)).float(),)


def hypernetwork(module: Any, x: torch.Tensor) -> Outputs:
    return ((module.b @ x.t()) @ x @ module.a,)


def checkpointed(module: nn.Module, x: torch.Tensor) -> Outputs:
    y = checkpoint(module, x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    return (y * 2,)


def reentrant(module: nn.Module, x: torch.Tensor) -> Outputs:
    y = checkpoint(module, x * 1 if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True)
    assert isinstance(y, torch.Tensor)
    return (y,)


def saved_on_cpu(module: nn.Module, x: torch.Tensor) -> Outputs:
    with torch.autograd.graph.save_on_cpu():
        return (module(x),)


def cast_weight(module: Any, x: torch.Tensor) -> Outputs:
    weight = with_hook(module.a * 1, 0.5)
    return (x @ weight + with_hook(module.b * 1, 3.0).exp() * weight[0],)


def compiled(module: nn.Module, x: torch.Tensor) -> Outputs:
    return (torch.compile(module, backend="aot_eager")(x) * 2,)


SQUARE = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)}
BATCHED = {"a": (2, WIDTH, WIDTH), "b": (2, 1, WIDTH)}

CASES = {
    "mlp": Case(build=mlp),
    "linear 3d": Case(
        build=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 3, bias=False)),
        inputs=normal_inputs(2, 3, WIDTH),
    ),
    "linear 3d not contiguous": Case(
        build=lambda: nn.Linear(WIDTH, 8), forward=lambda m, x: (m(x.mT),), inputs=normal_inputs(2, WIDTH, 3)
    ),
    "linear 1d": Case(build=mlp, inputs=normal_inputs(WIDTH)),
    "transformer": Case(
        build=lambda: nn.Sequential(Block(8, 2, dropout=0.3), Block(8, 2)), inputs=normal_inputs(2, 5, 8)
    ),
    "embedding, no input with gradient": Case(
        build=lambda: nn.Sequential(nn.Embedding(9, 8), Block(8, 2)), inputs=lambda: [torch.randint(9, (2, 5))]
    ),
    "embedding of positions": Case(
        build=lambda: nn.ModuleList([nn.Embedding(4, WIDTH), mlp()]),
        forward=lambda m, x: (m[1](x + m[0](torch.arange(4))),),
    ),
    "convolution": Case(
        build=lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 2)),
        inputs=normal_inputs(4, 2, WIDTH),
    ),
    "checkpoint": Case(build=mlp, forward=checkpointed),
    "checkpoint of a function": Case(
        build=lambda: Holder(**SQUARE),
        forward=lambda m, x: (checkpoint(lambda t: AskingProduct.apply(t, 2.0, m.a), x, use_reentrant=False),),
    ),
    "reentrant checkpoint, no input with gradient": Case(
        build=mlp, forward=reentrant, inputs=lambda: [torch.randn(4, WIDTH, dtype=torch.float64)]
    ),
    "offloaded": Case(build=mlp, forward=saved_on_cpu),
    "compiled": Case(build=mlp, forward=compiled),
    "autocast": Case(build=lambda: nn.Linear(WIDTH, WIDTH), forward=autocast_forward),
    "bmm": Case(
        build=lambda: Holder(**BATCHED),
        forward=lambda m, x: (m.a.bmm(x.bmm(m.a)),),
        inputs=normal_inputs(2, WIDTH, WIDTH),
        is_exact=False,
    ),
    "baddbmm": Case(
        build=lambda: Holder(**BATCHED),
        forward=lambda m, x: (torch.baddbmm(m.b, x, m.a),),
        inputs=normal_inputs(2, 4, WIDTH),
    ),
    "einsum": Case(
        build=lambda: Holder(**BATCHED),
        forward=lambda m, x: (torch.einsum("gbi,gio->bgo", x, m.a),),
        inputs=normal_inputs(2, 4, WIDTH),
    ),
    "weight on the left": Case(build=lambda: Holder(**SQUARE), forward=lambda m, x: (m.b.t() @ (m.a @ x.t()),)),
    "weight not transposed": Case(build=lambda: Holder(**SQUARE), forward=lambda m, x: (x @ m.a @ m.b,)),
    "weight on both sides": Case(build=lambda: Holder(**SQUARE), forward=lambda m, x: (x @ (m.a @ m.b.t()),)),
    "vectors": Case(
        build=lambda: Holder(a=(WIDTH,), b=(4,)), forward=lambda m, x: (x @ m.a, m.b @ x, torch.outer(m.b, x[0]))
    ),
    "scaled addmm": Case(
        build=lambda: Holder(a=(WIDTH, WIDTH), b=(WIDTH,)),
        forward=lambda m, x: (torch.addmm(m.b, x, m.a, beta=0.5, alpha=2), torch.addmm(x, x, m.a)),
        is_exact=False,
    ),
    "product of weights, input as bias": Case(
        build=lambda: Holder(a=(4, 3), b=(3, WIDTH)), forward=lambda m, x: (torch.addmm(x, m.a, m.b),)
    ),
    "weights that are sums, in a ring": Case(
        build=lambda: Holder(a=(WIDTH, WIDTH), b=(WIDTH, WIDTH), c=(WIDTH, WIDTH), d=(WIDTH, WIDTH)),
        forward=lambda m, x: (x @ (m.a + m.b) @ (m.c + m.d) @ (m.b + m.c) @ (m.d + m.a).exp(),),
        is_exact=False,
    ),
    "weight from an input": Case(build=lambda: Holder(a=(WIDTH, 3), b=(2, WIDTH)), forward=hypernetwork),
    "weight norm": Case(
        build=lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), mlp()), is_exact=False
    ),
    "spectral norm": Case(build=lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), is_exact=False),
    "tied weight": Case(
        build=lambda: nn.Linear(WIDTH, WIDTH), forward=lambda m, x: (m(m(x).relu()) @ m.weight,), is_exact=False
    ),
    "in a GEMM and outside": Case(
        build=lambda: Holder(a=(WIDTH, WIDTH), b=(WIDTH,)),
        forward=lambda m, x: ((x * m.b) @ m.a + m.a.sum(0) * m.b,),
        is_exact=False,
    ),
    "in a GEMM through a function, and outside": Case(
        build=lambda: Holder(a=(WIDTH, WIDTH), b=(WIDTH,)),
        forward=lambda m, x: ((x * m.b).sum(1, keepdim=True) + x @ (m.a.exp() * m.b) + m.a.exp().square() * x.mean(),),
        inputs=normal_inputs(WIDTH, WIDTH),
        is_exact=False,
    ),
    "unused and frozen": Case(
        build=lambda: frozen(mlp(4), "0.0.weight", "1.0.bias", "3.0.weight", "3.0.bias"),
        forward=lambda m, x: (m[3](m[1](m[0](x))),),
    ),
    "nothing to learn": Case(build=lambda: frozen(nn.Linear(WIDTH, WIDTH), "weight", "bias")),
    "in place, views, cat and split": Case(build=lambda: mlp(2), forward=in_place),
    "several outputs": Case(build=mlp, forward=several_outputs, is_exact=False),
    "only an output of weights": Case(build=mlp, forward=lambda m, x: (m[0][0].weight.sum(),)),
    "identity": Case(build=mlp, forward=lambda m, x: (x,)),
    "several inputs": Case(
        build=mlp,
        forward=lambda m, x, unused, constant, nothing: (m(x) * constant,),
        inputs=lambda: [*normal_inputs(4, WIDTH)(), *normal_inputs(2)(), torch.ones(1, dtype=torch.float64), None],
    ),
    "function that does not ask": Case(
        build=lambda: Holder(**SQUARE),
        forward=lambda m, x: (PlainProduct.apply(PlainProduct.apply(x, 2.0, m.a), 1.0, m.b * 2),),
    ),
    "function that asks": Case(
        build=lambda: Holder(**SQUARE),
        forward=lambda m, x: (AskingProduct.apply(AskingProduct.apply(x, 2.0, m.a), 1.0, m.b * 2),),
    ),
    "one weight, functions of both kinds": Case(
        build=lambda: Holder(**SQUARE),
        forward=lambda m, x: (AskingProduct.apply(PlainProduct.apply(x, 2.0, m.a), 1.0, m.a),),
        is_exact=False,
    ),
    "function that asks, without weight gradient": Case(
        build=lambda: Holder(**SQUARE), forward=lambda m, x: (AskingProduct.apply(x, 2.0, m.a.detach()) @ m.b,)
    ),
    "function with two outputs": Case(
        build=lambda: Holder(a=(WIDTH,), b=(WIDTH,)), forward=lambda m, x: Pair.apply(x, m.a, m.b)
    ),
    "function with two outputs, one used": Case(
        build=lambda: Holder(a=(WIDTH,), b=(WIDTH,)), forward=lambda m, x: Pair.apply(x, m.a, m.b)[:1]
    ),
    "hooks of parameters": Case(
        build=lambda: hooked(nn.Sequential(nn.LayerNorm(WIDTH), mlp()), "0.weight", "0.bias", "1.0.0.weight")
    ),
    "hooks of activations": Case(
        build=lambda: mlp(2),
        forward=lambda m, x: (with_hook(m[1][0](with_hook(with_hook(m[0][0](x), 2.0).relu(), 5.0)), 0.1),),
    ),
    "hooks of weights that are computed": Case(
        build=lambda: Holder(a=(WIDTH, WIDTH), b=(WIDTH,)), forward=cast_weight, is_exact=False
    ),
}


class Microbatch:
    """A forward pass and the gradients of its outputs, the same for the same index."""

    def __init__(self, case: Case, module: nn.Module, index: int) -> None:
        torch.manual_seed(100 + index)
        self.inputs = case.inputs()
        self.outputs = list(case.forward(module, *self.inputs))
        self.output_grads = [torch.randn_like(output) for output in self.outputs]


def build(case: Case) -> tuple[nn.Module, dict[str, int]]:
    """Return a module in double precision, and a count of its post-accumulate hooks."""
    torch.manual_seed(3)
    module = case.build().double()
    calls: dict[str, int] = collections.defaultdict(int)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:

            def count(_: torch.Tensor, name: str = name) -> None:
                calls[name] += 1

            parameter.register_post_accumulate_grad_hook(count)
    return module, calls


def run_plain(case: Case) -> tuple[list[Any], dict[str, torch.Tensor | None], dict[str, int]]:
    module, calls = build(case)
    input_grads = []
    for index in range(3):
        batch = Microbatch(case, module, index)
        outputs = [output for output in batch.outputs if output.requires_grad]
        grads = [grad for output, grad in zip(batch.outputs, batch.output_grads, strict=True) if output.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, grads)
        input_grads.append([None if tensor is None else tensor.grad for tensor in batch.inputs])
    return input_grads, {name: parameter.grad for name, parameter in module.named_parameters()}, calls


def run_split(case: Case, order: tuple[str, ...]) -> tuple[list[Any], dict[str, torch.Tensor | None], dict[str, int]]:
    module, calls = build(case)
    batches = [Microbatch(case, module, index) for index in range(3)]
    results = {}
    for action in order:
        index = int(action[1])
        batch = batches[index]
        if action[0] == "I":
            calls_before = dict(calls)
            results[index] = stage_backward_input(
                outputs=batch.outputs,
                output_grads=batch.output_grads,
                inputs=batch.inputs,
                weights=iter(module.parameters()),
            )
            assert calls == calls_before
        else:
            stage_backward_weight(weights=iter(module.parameters()), param_groups=results[index].param_groups)
    assert all(tensor is None or tensor.grad is None for batch in batches for tensor in batch.inputs)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return [results[index].input_grads for index in range(3)], grads, calls


def stride(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()


def assert_same(actual: torch.Tensor | None, expected: torch.Tensor | None, *, is_exact: bool) -> None:
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert actual.dtype == expected.dtype
    if is_exact:
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("max_pending_bytes", [1, MAX_PENDING_BYTES])
@pytest.mark.parametrize("name", CASES)
def test_halves_give_what_a_whole_pass_gives(
    name: str, max_pending_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradients, "MAX_PENDING_BYTES", max_pending_bytes)
    case = CASES[name]
    expected_inputs, expected, expected_calls = run_plain(case)
    actual_inputs, actual, calls = run_split(case, SPLIT_ORDER)
    for actual_list, expected_list in zip(actual_inputs, expected_inputs, strict=True):
        for actual_grad, expected_grad in zip(actual_list, expected_list, strict=True):
            # A gradient that flows back along several branches may be added up in another order.
            assert_same(actual_grad, expected_grad, is_exact=case.is_exact)
    assert actual.keys() == expected.keys()
    for parameter in expected:
        assert stride(actual[parameter]) == stride(expected[parameter])
        assert_same(actual[parameter], expected[parameter], is_exact=case.is_exact)
    # In a plain pass, hooks also fire for a parameter that autograd reaches without bringing it a gradient.
    assert calls == {name: count for name, count in expected_calls.items() if expected[name] is not None}


@pytest.mark.parametrize("name", CASES)
def test_full_backward_is_a_plain_one(name: str) -> None:
    case = CASES[name]
    expected_inputs, expected, expected_calls = run_plain(case)
    module, calls = build(case)
    for index in range(3):
        batch = Microbatch(case, module, index)
        grads = stage_backward_full(outputs=batch.outputs, output_grads=batch.output_grads, inputs=batch.inputs)
        for actual_grad, expected_grad in zip(grads, expected_inputs[index], strict=True):
            assert_same(actual_grad, expected_grad, is_exact=True)
        assert all(tensor is None or tensor.grad is None for tensor in batch.inputs)
    for parameter_name, parameter in module.named_parameters():
        assert_same(parameter.grad, expected[parameter_name], is_exact=True)
    assert calls == expected_calls


def test_asks_functions_for_one_half_at_a_time() -> None:
    case = CASES["function that asks"]
    module, _ = build(case)
    batch = Microbatch(case, module, 0)
    AskingProduct.calls.clear()
    result = stage_backward_input(batch.outputs, batch.output_grads, batch.inputs, module.parameters())
    assert AskingProduct.calls == {"inputs": 2}
    stage_backward_weight(module.parameters(), result.param_groups)
    assert AskingProduct.calls == {"inputs": 2, "weight": 2}


def test_refuses_a_function_that_withholds_what_an_input_needs() -> None:
    module = Holder(**SQUARE)
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = AskingProduct.apply(module.a, 2.0, x.t() @ x)
    with pytest.raises(NotImplementedError, match="AskingProduct withholds the gradient of its tensor argument 1"):
        stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())


def test_restores_the_directions_after_an_error() -> None:
    class Failing(AskingProduct):
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            raise ArithmeticError("no gradient")

    module = Holder(**SQUARE)
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(ArithmeticError, match="no gradient"):
        stage_backward_input([Failing.apply(x, 1.0, module.a)], [torch.ones(4, WIDTH)], [x], module.parameters())
    assert all(GLOBAL_GRAD_CONTEXT.check_direction(direction) for direction in GradDirection)


class CountGemms(TorchDispatchMode):
    """Counts matrix products, and notes where other things happen between them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.events.append("gemm")
        return func(*args, **(kwargs or {}))

    @property
    def num_gemms(self) -> int:
        return self.events.count("gemm")


@pytest.mark.parametrize(
    ("build_module", "shape", "num_gemms"),
    [
        (lambda: mlp(4), (4, WIDTH), 4),
        (lambda: nn.Sequential(Block(8, 2), Block(8, 2)), (2, 5, 8), 8),
    ],
)
def test_each_half_multiplies_once_per_layer(
    build_module: Callable[[], nn.Module], shape: tuple[int, ...], num_gemms: int
) -> None:
    module = build_module()
    x = torch.randn(*shape, requires_grad=True)
    y = module(x)
    with CountGemms() as first:
        result = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    with CountGemms() as second:
        stage_backward_weight(module.parameters(), result.param_groups)
    with CountGemms() as whole:
        stage_backward_full([module(x)], [torch.ones_like(y)], [x])
    forward_gemms = num_gemms
    attention_gemms = whole.num_gemms - forward_gemms - 2 * num_gemms  # of the math kernel, where torch has no other
    assert first.num_gemms == num_gemms + attention_gemms
    assert second.num_gemms == num_gemms


def test_a_stage_without_differentiable_inputs_does_all_in_the_second_half() -> None:
    module = mlp(2)
    y = module(torch.randn(4, WIDTH))
    with CountGemms() as first:
        result = stage_backward_input([y], [torch.ones_like(y)], [None], module.parameters())
    assert first.num_gemms == 0
    assert result.input_grads == [None]
    stage_backward_weight(module.parameters(), result.param_groups)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_recomputes_a_checkpoint_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(2)
            self.num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return self.layers(x)

    module = Counting().double()
    batch = Microbatch(CASES["checkpoint"], module, 0)
    result = stage_backward_input(batch.outputs, batch.output_grads, batch.inputs, module.parameters())
    stage_backward_weight(module.parameters(), result.param_groups)
    assert module.num_calls == 2


def test_refuses_a_reentrant_checkpoint_on_the_path() -> None:
    module = mlp(2).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    (y,) = reentrant(module, x)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())


@pytest.mark.parametrize("is_split", [True, False])
def test_takes_edges_of_outputs_that_are_gone(is_split: bool) -> None:
    module = mlp(2)
    x = torch.randn(4, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    y = module(x) * 1
    edge, alive = get_gradient_edge(y), weakref.ref(y)
    del y
    assert alive() is None
    grads = [torch.ones(4, WIDTH)]
    if is_split:
        result = stage_backward_input([edge], grads, [x], module.parameters())
        stage_backward_weight(module.parameters(), result.param_groups)
        input_grads = result.input_grads
    else:
        input_grads = stage_backward_full([edge], grads, [x])
    for actual, wanted in zip([*input_grads, *(p.grad for p in module.parameters())], expected, strict=True):
        assert_same(actual, wanted, is_exact=True)


@pytest.mark.parametrize("as_edge", [True, False])
def test_a_loss_needs_no_gradient_and_an_output_without_one_is_left_out(as_edge: bool) -> None:
    module = mlp(2).double()
    grads = []
    for is_split in (True, False):
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = module(x)
        outputs: list[Any] = [y.square().mean(), y * 100]
        outputs = [get_gradient_edge(output) for output in outputs] if as_edge else outputs
        if is_split:
            result = stage_backward_input(outputs, None, [x], module.parameters())
            stage_backward_weight(module.parameters(), result.param_groups)
            grads.append(result.input_grads[0])
        else:
            grads.append(stage_backward_full(outputs, None, [x])[0])
    (expected,) = torch.autograd.grad(module(x).square().mean(), x)
    assert_same(grads[0], expected, is_exact=True)
    assert_same(grads[1], expected, is_exact=True)


def test_the_same_input_twice() -> None:
    module = mlp(2)
    x = torch.randn(4, WIDTH, requires_grad=True)
    whole = stage_backward_full([module(x) + x], [torch.ones(4, WIDTH)], [x, x])
    result = stage_backward_input([module(x) + x], [torch.ones(4, WIDTH)], [x, x], module.parameters())
    for actual in (*whole, *result.input_grads):
        assert_same(actual, whole[0], is_exact=True)


def test_without_a_gradient_nothing_happens() -> None:
    module = mlp(2)
    x = torch.randn(4, WIDTH, requires_grad=True)
    result = stage_backward_input([module(x)], [None], [x], module.parameters())
    stage_backward_weight(module.parameters(), result.param_groups)
    assert result.input_grads == [None]
    assert stage_backward_full([module(x)], [None], [x]) == [None]
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is freed is freed by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe(nn.Module):
    """Notes the activation that passes, which the layer behind saves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.ref[Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = weakref.ref(x.untyped_storage())
        return x

    @property
    def is_alive(self) -> bool:
        return self.seen is not None and self.seen() is not None


@pytest.mark.usefixtures("no_gc")
def test_frees_what_each_half_is_done_with() -> None:
    for_inputs, for_weights = Probe(), Probe()
    module = nn.Sequential(nn.Linear(WIDTH, 8), for_inputs, nn.GELU(), for_weights, nn.Linear(8, WIDTH))
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = module(x)
    grad = torch.ones_like(y)
    grad_alive = weakref.ref(grad)
    result = stage_backward_input([y], [grad], [x], module.parameters())
    del grad
    assert grad_alive() is not None
    assert not for_inputs.is_alive
    assert for_weights.is_alive
    stage_backward_weight(module.parameters(), result.param_groups)
    # `y` and `result` are still here.
    assert grad_alive() is None
    assert not for_weights.is_alive


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"compiled"}))  # the compiler keeps what it wants
@pytest.mark.usefixtures("no_gc")
def test_leaks_nothing(name: str) -> None:
    case = CASES[name]
    module, _ = build(case)
    batch = Microbatch(case, module, 0)
    alive = [
        weakref.ref(tensor) for tensor in [*batch.outputs, *batch.output_grads, *batch.inputs] if tensor is not None
    ]
    result = stage_backward_input(batch.outputs, batch.output_grads, batch.inputs, module.parameters())
    nodes = [
        weakref.ref(output.grad_fn) for output in batch.outputs if isinstance(output.grad_fn, torch.autograd.Function)
    ]
    stage_backward_weight(module.parameters(), result.param_groups)
    del batch, result
    assert [reference() for reference in (*alive, *nodes) if reference() is not None] == []


@pytest.mark.usefixtures("no_gc")
def test_leaks_nothing_if_the_second_half_never_runs() -> None:
    case = CASES["function that asks"]
    module, _ = build(case)
    batch = Microbatch(case, module, 0)
    alive = [weakref.ref(tensor) for tensor in [*batch.outputs, *batch.inputs] if tensor is not None]
    result = stage_backward_input(batch.outputs, batch.output_grads, batch.inputs, module.parameters())
    del batch, result
    assert [reference() for reference in alive if reference() is not None] == []


def test_large_gradients_are_accumulated_before_all_are_computed() -> None:
    width = 2048
    num_layers = 4
    assert 2 * width * width * 4 < MAX_PENDING_BYTES * 4 < 2 * num_layers * width * width * 4 * 4
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)], nn.Linear(width, 1))
    counts = CountGemms()
    for layer in module:
        assert isinstance(layer, nn.Linear)
        layer.weight.register_post_accumulate_grad_hook(lambda _: counts.events.append("accumulated"))
    x = torch.randn(2, width, requires_grad=True)
    y = module[3](module[0](module[2](module[1](module[0](x)))))  # one of them is used twice
    result = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    with counts:
        stage_backward_weight(module.parameters(), result.param_groups)
    assert counts.events.count("accumulated") == num_layers
    assert counts.num_gemms == num_layers + 1
    assert "accumulated" in counts.events[: len(counts.events) - 2]
    actual = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    y = module[3](module[0](module[2](module[1](module[0](x)))))
    y.backward(torch.ones_like(y))
    for got, parameter in zip(actual, module.parameters(), strict=True):
        if parameter.grad is None:
            assert got is None
        else:
            torch.testing.assert_close(got, parameter.grad)


def test_takes_over_a_first_gradient_without_a_copy() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = module(x)
    result = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())

    class NotePointers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            value = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                pointers.append(value.untyped_storage().data_ptr())
            return value

    pointers: list[int] = []
    with NotePointers():
        stage_backward_weight(module.parameters(), result.param_groups)
    assert module.weight.grad is not None
    assert pointers == [module.weight.grad.untyped_storage().data_ptr()]


def test_a_graph_that_is_changed_between_the_halves_is_refused() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    result = stage_backward_input([module(x)], [torch.ones(4, WIDTH)], [x], module.parameters())
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified in place after the input half"):
        stage_backward_weight(module.parameters(), result.param_groups)


def test_gradients_from_inference_mode_are_taken() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    with torch.inference_mode():
        grad = torch.ones(4, WIDTH)
    result = stage_backward_input([module(x)], [grad], [x], module.parameters())
    stage_backward_weight(module.parameters(), result.param_groups)
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [4.0] * WIDTH


def test_errors_say_what_is_wrong() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = module(x)
    with pytest.raises(ValueError, match=r"Stage input 1 .* is not a leaf"):
        stage_backward_full([y], [None], [x, x * 2])
    with pytest.raises(ValueError, match=r"Stage input 0 .* is not a leaf"):
        stage_backward_input([y], [None], [x * 2], module.parameters())
    with pytest.raises(ValueError, match="1 outputs but 2 gradients"):
        stage_backward_full([y], [None, None], [x])
    result = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    stage_backward_weight(module.parameters(), result.param_groups)
    with pytest.raises(RuntimeError, match="called twice"):
        stage_backward_weight(module.parameters(), result.param_groups)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_parity(plain: nn.Module, module: nn.Module, batches: list[torch.Tensor], *, local: slice) -> None:
    """Compare microbatches in interleaved halves with plain passes over the whole batch."""
    for batch in batches:
        (plain(batch).square().sum()).backward()
    inputs = [batch[local].clone().requires_grad_() for batch in batches]
    losses = [module(x).square().sum() for x in inputs]
    results = {}
    for action in SPLIT_ORDER:
        index = int(action[1])
        if action[0] == "I":
            results[index] = stage_backward_input([losses[index]], None, [inputs[index]], module.parameters())
        else:
            stage_backward_weight(module.parameters(), results[index].param_groups)
    for index, batch in enumerate(batches):
        (expected,) = torch.autograd.grad(plain(x := batch.clone().requires_grad_()).square().sum(), x)
        torch.testing.assert_close(results[index].input_grads[0], expected[local], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.world_size(2)
def test_tensor_parallel_stage() -> None:
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    module = copy.deepcopy(plain)
    parallelize_module(module, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    assert_parity(plain, module, [torch.randn(4, 8, dtype=torch.float64) for _ in range(3)], local=slice(None))
    for expected, parameter in zip(plain.parameters(), module.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), expected.grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.world_size(2)
def test_stage_of_distributed_tensors() -> None:
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, dtype=torch.float64) for _ in range(2)]
    x, grad = (torch.randn(4, 8, dtype=torch.float64) for _ in range(2))

    def run(place: Callable[[torch.Tensor, Any], torch.Tensor], *, is_split: bool) -> list[torch.Tensor]:
        parameters = [nn.Parameter(place(weights[0], Shard(1))), nn.Parameter(place(weights[1], Replicate()))]
        source = place(x, Replicate()).requires_grad_()
        y = (source @ parameters[0]).relu() @ parameters[1].t()
        if is_split:
            result = stage_backward_input([y], [place(grad, Replicate())], [source], parameters)
            stage_backward_weight(parameters, result.param_groups)
            return [full(tensor) for tensor in (*result.input_grads, *(p.grad for p in parameters))]
        grads = stage_backward_full([y], [place(grad, Replicate())], [source])
        return [full(tensor) for tensor in (*grads, *(p.grad for p in parameters))]

    expected = run(lambda tensor, placement: tensor.clone(), is_split=False)
    actual = run(lambda tensor, placement: distribute_tensor(tensor, mesh, [placement]), is_split=True)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.world_size(2)
def test_fsdp_stage_that_accumulates() -> None:
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    module: Any = copy.deepcopy(plain)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    module.set_requires_gradient_sync(False)
    rank = mesh.get_local_rank()
    batches = [torch.randn(4, 8, dtype=torch.float64) for _ in range(3)]
    assert_parity(plain, module, batches, local=slice(2 * rank, 2 * rank + 2))
    # What W accumulates lies in the parameters that FSDP has gathered, for a reduction of its own later.
    for name, parameter in unsharded_parameters(module).items():
        grad = parameter.grad
        assert grad is not None
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=TOLERANCE, atol=TOLERANCE)


def unsharded_parameters(module: Any) -> dict[str, nn.Parameter]:
    group = module._get_fsdp_state()._fsdp_param_group  # to look into it, as nothing public does
    return {param._param_fqn: param.unsharded_param for param in group.fsdp_params}
