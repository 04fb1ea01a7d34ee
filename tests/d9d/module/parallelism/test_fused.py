"""Fused projections, split by groups: a step of one process, and heads that stay together."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.internals.materialize import materialize_module
from d9d.module.compilation import compile_blocks
from d9d.module.parallelism.api import parallelize_tensor
from d9d.module.parallelism.explain import predict_layouts
from d9d.module.parallelism.fused import FusedColwiseParallel
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan
from d9d.module.parallelism.plan_apply import parallelize_by_plan
from tests.d9d.module.block.oracles import FP64, randomize
from tests.d9d.module.model.test_distributed import synchronized
from tests.harness.parity import assert_close_tree, named_full_gradients, named_full_parameters, sgd_step

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, WIDTH = 6, 4, 2, 3, 8
COUNTS = (HEADS, KEY_HEADS, KEY_HEADS)
PLAN = {
    "qkv": "colwise_fused(4, 2, 2)",
    "out": "rowwise",
    "mlp.gate_up": f"colwise_fused({WIDTH}, {WIDTH})",
    "mlp.down": "rowwise",
}


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * WIDTH, bias=False), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Nothing in it is about parallelism, but that it asks how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, sum(COUNTS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.mlp = GatedMlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([count * heads.shape[1] // sum(COUNTS) for count in COUNTS], 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


def plan() -> ParallelPlan:
    return ParallelPlan.read(PLAN, 10, None, None)


def check(**degrees: int) -> None:
    context = DeviceMeshParameters(**degrees).build()
    single = Block().double()
    randomize(single)
    split = copy.deepcopy(single)
    parallelize_by_plan(split, context, plan())
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    synchronizer = synchronized(split)
    outputs, expected = split(x), single(x)
    torch.testing.assert_close(outputs, expected, **FP64)
    (outputs.sin().sum() / context.mesh_params.data_ranks).backward()
    expected.sin().sum().backward()
    synchronizer.wait()
    assert_close_tree(fused(named_full_gradients(split)), named_full_gradients(single), **FP64)
    for model in (split, single):
        sgd_step(model)
    assert_close_tree(fused(named_full_parameters(split)), named_full_parameters(single), **FP64)


def fused(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the groups of each layer together again."""
    grouped: dict[str, list[torch.Tensor]] = {}
    for name, part in parts.items():
        layer, _, rest = name.partition(".parts.")
        grouped.setdefault(f"{layer}.{rest[2:]}" if rest else name, []).append(part)
    return {name: torch.cat(found) for name, found in grouped.items()}


@pytest.mark.world_size(2)
def test_two_ranks():
    check(tensor_parallel=2)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("data", ["data_parallel_shard", "data_parallel_replicate"])
def test_four_ranks(data: str):
    check(**{"tensor_parallel": 2, data: 2})


@pytest.mark.world_size(2)
def test_a_rank_has_its_heads_of_each_group():
    """Rows of queries have the values 100 and so on, those of keys 200, those of values 300."""
    layer = nn.Linear(1, sum(COUNTS) * HEAD_DIM, bias=False)
    rows = [100.0 * (group + 1) + row for group, count in enumerate(COUNTS) for row in range(count * HEAD_DIM)]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows).unsqueeze(-1))
    layer.requires_grad_(False)
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    parallelize_tensor(layer, FusedColwiseParallel(COUNTS), mesh)
    own = {
        0: [*range(100, 106), *range(200, 203), *range(300, 303)],
        1: [*range(106, 112), *range(203, 206), *range(303, 306)],
    }
    assert layer(torch.ones(1, 1)).flatten().tolist() == own[dist.get_rank()]
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.ones(1, 1, requires_grad=True)
    output = copy.deepcopy(layer)(x)
    with CommDebugMode() as backward:
        output.sum().backward()
    assert backward.get_total_counts() == 1
    assert x.grad.item() == sum(rows)


@pytest.mark.world_size(2)
def test_layers_that_are_alike_share_compiled_code():
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(10)))
    for block in blocks:
        parallelize_tensor(block[0], FusedColwiseParallel((2, 2)), mesh)
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    compile_blocks(blocks, backend=backend, fullgraph=True)
    x = torch.ones(3, 8)
    for block in blocks:
        block(x).sum().backward()
    assert len(compiled) == 1


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Narrow(nn.Linear):
    """Has other first values than torch's."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(0.1)


class BlockWithValues(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Narrow(HIDDEN, sum(COUNTS) * HEAD_DIM)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("data", ["data_parallel_shard", "data_parallel_replicate"])
def test_first_values_are_those_of_the_whole_layer(data: str):
    context = DeviceMeshParameters(**{"tensor_parallel": 2, data: 2}).build()
    with torch.device("meta"):
        split, single = BlockWithValues(), BlockWithValues()
    parallelize_by_plan(split, context, plan())
    for model in (split, single):
        materialize_module(model, torch.device("cpu"), 7)
    assert_close_tree(fused(named_full_parameters(split)), named_full_parameters(single), rtol=0, atol=0)
    assert 0 < single.qkv.weight.abs().max() < 0.1 < single.mlp.gate_up.weight.abs().max()
    assert not any(name.endswith(("qkv.weight", "qkv.bias")) for name in split.state_dict())


@pytest.mark.world_size(2)
def test_what_can_not_be_taken_apart():
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    with pytest.raises(NotImplementedError, match=r"a Doubled has a forward method of its own"):
        parallelize_tensor(Doubled(2, 8), FusedColwiseParallel((2, 2)), mesh)
    with pytest.raises(NotImplementedError, match=r"is for nn\.Linear, not for a Embedding"):
        parallelize_tensor(nn.Embedding(2, 8), FusedColwiseParallel((2, 2)), mesh)
    tied = Block()
    tied.again = nn.Linear(HIDDEN, sum(COUNTS) * HEAD_DIM)
    tied.again.weight = tied.qkv.weight
    patterns = {**PLAN, "again": "colwise_fused(4, 2, 2)"}
    with pytest.raises(ValueError, match="are one parameter, and must be split alike"):
        parallelize_by_plan(
            tied, DeviceMeshParameters(tensor_parallel=2).build(), ParallelPlan.read(patterns, 10, None, None)
        )


@pytest.mark.parametrize(
    ("patterns", "degree", "message"),
    [
        (PLAN, 4, r"groups of 4, 2, 2 can not be shared .* = 4 ranks\. Set tensor_parallel to one of 1, 2"),
        ({**PLAN, "qkv": "colwise_fused(4, 4, 1)"}, 2, r"24 features can not be 9 = 4 \+ 4 \+ 1 heads"),
        ({**PLAN, "qkv": "colwise_fused(4, 0)"}, 2, "Give the number of heads"),
        ({**PLAN, "qkv": "colwise_fused()"}, 2, r"unknown placement 'colwise_fused\(\)'"),
        ({"qkv": "colwise_fused(4, 2, 2)"}, 2, "no layer beside it is 'rowwise'"),
    ],
)
def test_what_is_wrong_with_a_plan(patterns: dict[str, str], degree: int, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_plan(Block(), ParallelPlan.read(patterns, 10, None, None), DeviceMeshParameters(tensor_parallel=degree))


def test_bytes_are_foretold():
    params = DeviceMeshParameters(tensor_parallel=2)
    block = Block()
    layouts = predict_layouts(block, resolve_plan(block, plan(), params), params)
    assert layouts["qkv.weight"].placements == (("tp", "dim 0"),)
    assert layouts["qkv.weight"].num_local == sum(COUNTS) * HEAD_DIM * HIDDEN // 2
