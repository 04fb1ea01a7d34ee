"""Adapters on every mesh against one process: losses of five steps, gradients and parameters of the first."""

import re
import zlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from d9d.core.dist_context import DENSE_DOMAIN, EXPERT_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor, shard_of
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
)
from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.moe import MoELayer
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.parallelism.api import (
    parallelize_expert_parallel,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor_ffn,
)
from d9d.module.parallelism.explain import predict_layouts, read_layouts
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan
from d9d.module.parallelism.plan_apply import parallelize_by_plan
from d9d.module.parallelism.tensor import parallelize_tensor
from d9d.module.parallelism.tensor_blocks import parallelize_tensor_attention
from d9d.peft import inject_peft_and_freeze, merge_peft
from d9d.peft.full_tune import FullTune, FullTuneConfig
from d9d.peft.lora import LoRA, LoRAConfig, LoRALinear, LoRAParameters
from tests.d9d.module.block.oracles import randomize
from tests.harness.parity import assert_close_tree, full, named_full_gradients, named_full_parameters
from tests.numerics.model_runs import Layout, Provider, run_engine, run_plainly

TOLERANCE = {"rtol": 0.0, "atol": 1e-10}
LIMIT_S = 240.0  # each operation of a split layer goes through DTensor, in Python

ATTENTION_AND_FFN = LoRA(
    LoRAConfig(
        module_name_pattern=re.compile(r".*\.(q|k|v|o|up|gate|down|kv_up)_proj"),
        params=LoRAParameters(r=2, alpha=4, dropout=0.0),
    )
)
DENSE, MOE, LATENT = "qwen3 dense", "qwen3 moe", "deepseek v3"
LAYOUTS = {
    "tp 2": Layout(degrees={"tensor_parallel": 2}),
    "tp 2, parts of sequences": Layout(degrees={"tensor_parallel": 2}, sequence_parallel=True),
    "replicate 2": Layout(degrees={"data_parallel_replicate": 2}),
    "shard 2": Layout(degrees={"data_parallel_shard": 2}),
    "ep 2": Layout(degrees={"data_parallel_replicate": 2, "expert_parallel": 2}),
    "pp 2, zero bubble v": Layout(degrees={"pipeline_parallel": 2}, schedule="zero_bubble_v"),
    "tp 2 x shard 2": Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2}, sequence_parallel=True),
    "pp 2 x ep 2": Layout(
        degrees={"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}, schedule="1f1b"
    ),
}
DEFAULT = {
    (DENSE, "tp 2 x shard 2"),
    (LATENT, "tp 2, parts of sequences"),
    (MOE, "pp 2, zero bubble v"),
    (MOE, "pp 2 x ep 2"),
}
"""What runs each time. All else is exhaustive."""


class AdaptedProvider(Provider):
    """Injects adapters before the model is distributed."""

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Any]:
        result = super().initialize_model_stage(context)
        inject(result.model)
        return result


def fill_adapters(module: nn.Module) -> None:
    """Give adapters values that depend on their names alone, so that they add something."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
                local_tensor(parameter).copy_(shard_of(whole, parameter))


def inject(model: nn.Module) -> None:
    inject_peft_and_freeze(ATTENTION_AND_FFN, model)


def cases(num_ranks: int) -> list[object]:
    return [
        pytest.param(
            name, layout, id=f"{name}, {layout}", marks=[] if (name, layout) in DEFAULT else [pytest.mark.exhaustive]
        )
        for name in (DENSE, MOE, LATENT)
        for layout, described in LAYOUTS.items()
        if described.mesh.world_size == num_ranks and not (name == DENSE and "expert_parallel" in described.degrees)
    ]


@pytest.mark.world_size(2, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "layout"), cases(2))
def test_two_ranks(name: str, layout: str):
    check(name, layout)


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "layout"), cases(4))
def test_four_ranks(name: str, layout: str):
    check(name, layout)


def check(name: str, layout: str) -> None:
    expected = run_plainly(name, torch.float64, prepare=inject, change=fill_adapters)
    run = run_engine(name, torch.float64, LAYOUTS[layout], AdaptedProvider, fill_adapters)
    assert run.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE["atol"])
    assert run.gradients or LAYOUTS[layout].schedule == "zero_bubble_v"  # one rank has no layers there
    assert all("lora_" in each for each in run.gradients)
    for found, right in ((run.gradients, expected.gradients), (run.parameters, expected.parameters)):
        assert_close_tree(found, {key: right[key] for key in found}, **TOLERANCE)


def ffn_with_values() -> SwiGLU:
    model = SwiGLU(6, 10).double()  # a width that two shards of two splits do not divide
    randomize(model)
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["replicate", "shard", "tensor"])
def test_adapters_of_a_distributed_model(kind: str):
    """Injected behind the distribution: outputs are those of one process, and merged weights too."""
    degrees = {"tensor": {"tensor_parallel": 2}, "shard": {"data_parallel_shard": 2}}
    context = DeviceMeshParameters(**degrees.get(kind, {"data_parallel_replicate": 2})).build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    model = ffn_with_values()
    match kind:
        case "replicate":
            parallelize_replicate(model, mesh["dp_replicate"])
        case "shard":
            parallelize_hsdp(model, mesh["dp_replicate", "dp_cp_shard"])
        case "tensor":
            parallelize_tensor_ffn(model, mesh["tp"])
    torch.manual_seed(context.mesh_for(REGULAR_DOMAIN).get_rank())  # first values differ by rank, until they are sent
    compare_with_one_process(model, ffn_with_values(), torch.randn(3, 6, dtype=torch.float64, generator=seeded()))


@pytest.mark.world_size(2)
def test_adapters_of_distributed_experts():
    context = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build()

    def build() -> MoELayer:
        layer = MoELayer(5, 3, 4, 2, True).double()
        randomize(layer)
        return layer

    model = build()
    parallelize_expert_parallel(model, context.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard"])
    compare_with_one_process(model, build(), torch.randn(7, 5, dtype=torch.float64, generator=seeded()))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def compare_with_one_process(model: nn.Module, single: nn.Module, x: torch.Tensor) -> None:
    method = LoRA(
        LoRAConfig(
            module_name_pattern=re.compile(r".*(up|gate|down)_proj"),
            params=LoRAParameters(r=3, alpha=4, dropout=0.0),
        )
    )
    for each in (model, single):
        inject_peft_and_freeze(method, each)
    first = {name: tensor for name, tensor in named_full_parameters(model).items() if "lora_A" in name}
    assert all(tensor.abs().max() > 0 for tensor in first.values())
    for each in (model, single):
        fill_adapters(each)
    expected = single(x)
    torch.testing.assert_close(full(model(x)), expected, **TOLERANCE)
    for each in (model, single):
        merge_peft(method, each)
    assert not any(isinstance(child, LoRALinear) for child in model.modules())
    assert_close_tree(named_full_parameters(model), named_full_parameters(single), **TOLERANCE)
    torch.testing.assert_close(full(model(x)), expected, **TOLERANCE)


@pytest.mark.world_size(2)
def test_what_fsdp_has_gathered_is_frozen():
    """Behind a forward pass without a backward pass the root stays gathered: its shards are to be frozen."""
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    model = ffn_with_values()
    parallelize_hsdp(model, context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"])
    x = torch.randn(3, 6, dtype=torch.float64, generator=seeded())
    with torch.no_grad():
        model(x)
    inject_peft_and_freeze(FullTune(FullTuneConfig(module_name_pattern=re.compile("down_proj"))), model)
    model(x).sum().backward()
    parameters = dict(model.named_parameters())
    assert {name for name, each in parameters.items() if each.requires_grad} == {"down_proj.weight"}
    assert {name for name, each in parameters.items() if each.grad is not None} == {"down_proj.weight"}


class Pair(nn.Module):
    """Two layers by themselves, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.ffn = SwiGLU(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.down(self.up(x).tanh()))


@pytest.mark.world_size(2)
def test_plans_name_layers_with_adapters():
    """Outputs and gradients of one process, and each parameter is where the table of the plan says."""
    params = DeviceMeshParameters(tensor_parallel=2)
    context = params.build()
    plan = ParallelPlan.read({"up": "colwise", "down": "rowwise", "ffn": "ffn"}, 100, None, None)
    method = LoRA(
        LoRAConfig(module_name_pattern=re.compile(r"up|down|ffn\..*"), params=LoRAParameters(r=3, alpha=4, dropout=0.0))
    )

    def build() -> Pair:
        model = Pair().double()
        inject_peft_and_freeze(method, model)
        randomize(model)
        return model

    model, single = build(), build()
    predicted = predict_layouts(single, resolve_plan(single, plan, params), params)
    parallelize_by_plan(model, context, plan)
    read = read_layouts(model)
    assert {name: (each.domain, each.placements) for name, each in read.items()} == {
        name: (each.domain, each.placements) for name, each in predicted.items()
    }
    x = torch.randn(3, 6, dtype=torch.float64, generator=seeded())
    outputs = [full(each(x)) for each in (model, single)]
    torch.testing.assert_close(*outputs, **TOLERANCE)
    for output in outputs:
        output.sin().sum().backward()
    gradients = named_full_gradients(single)
    assert len(gradients) == 10
    assert_close_tree(named_full_gradients(model), gradients, **TOLERANCE)


@pytest.mark.world_size(4)
def test_split_and_sharded_layers_are_refused():
    context = DeviceMeshParameters(tensor_parallel=2, data_parallel_shard=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    model = ffn_with_values()
    parallelize_tensor_ffn(model, mesh["tp"])
    parallelize_hsdp(model, mesh["dp_replicate", "dp_cp_shard", "tp"])
    with pytest.raises(NotImplementedError, match="Inject adapters before the model is distributed"):
        inject_peft_and_freeze(ATTENTION_AND_FFN, nn.ModuleDict({"mlp": model}))


@pytest.mark.world_size(4)
def test_split_and_sharded_adapters_are_merged():
    context = DeviceMeshParameters(tensor_parallel=2, data_parallel_shard=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    models = [nn.ModuleDict({"mlp": ffn_with_values()}) for _ in range(2)]
    for each in models:
        inject_peft_and_freeze(ATTENTION_AND_FFN, each)
    model, single = models
    parallelize_tensor_ffn(model["mlp"], mesh["tp"])
    parallelize_hsdp(model["mlp"], mesh["dp_replicate", "dp_cp_shard", "tp"])
    for each in models:
        fill_adapters(each)
        merge_peft(ATTENTION_AND_FFN, each)
    x = torch.randn(3, 6, dtype=torch.float64, generator=seeded())
    assert_close_tree(named_full_parameters(model), named_full_parameters(single), **TOLERANCE)
    torch.testing.assert_close(full(model["mlp"](x)), single["mlp"](x), **TOLERANCE)


def adapted_layer(params: LoRAParameters) -> LoRALinear:
    layer = LoRALinear(nn.Linear(16, 12), params).double()
    randomize(layer)
    return layer


@pytest.mark.world_size(2)
def test_dropout_of_what_all_ranks_have_is_that_of_one_process():
    """Masks, and how far the random numbers have come."""
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    params = LoRAParameters(r=3, alpha=4, dropout=0.5)
    split, single = adapted_layer(params), adapted_layer(params)
    parallelize_tensor(split, ColwiseParallel(), mesh)
    x = torch.randn(5, 16, dtype=torch.float64, generator=seeded())
    outputs = []
    for layer in (split, single):
        torch.manual_seed(3)
        outputs.append(layer(x))
        outputs[-1].sin().sum().backward()
    after = torch.get_rng_state()
    torch.testing.assert_close(outputs[0], outputs[1].chunk(2, -1)[mesh.get_local_rank()], **TOLERANCE)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **TOLERANCE)
    torch.manual_seed(3)
    split(x)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.world_size(2)
def test_dropout_of_parts_has_masks_of_their_own():
    """An adapter that hands on its inputs shows what it has dropped."""
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    layer = LoRALinear(nn.Linear(64, 64, bias=False), LoRAParameters(r=64, alpha=64, dropout=0.5)).double()
    with torch.no_grad():
        layer.base.weight.zero_()
        for factor in (layer.lora_A, layer.lora_B):
            factor.weight.copy_(torch.eye(64))
    parallelize_tensor(layer, RowwiseParallel(), mesh)
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        x = torch.ones(8, 32, dtype=torch.float64, requires_grad=True)
        mask = full(layer(x))
        mask.sum().backward()
        torch.testing.assert_close(x.grad, mask.chunk(2, -1)[mesh.get_local_rank()].detach(), **TOLERANCE)
        masks.append(mask)
    assert torch.equal(*masks)
    assert set(masks[0].unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(*masks[0].chunk(2, -1))
    torch.testing.assert_close(full(layer.eval()(x)), torch.ones(8, 64, dtype=torch.float64), **TOLERANCE)


@pytest.mark.world_size(2)
def test_adapters_of_heads_that_ranks_share():
    """One key and value head for two ranks, each of which computes it."""
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]

    def build() -> GroupedQueryAttention:
        module = GroupedQueryAttention(8, 2, 1, 4, None, is_causal=True, rope_style=RotaryEmbeddingStyle.HALF).double()
        inject_peft_and_freeze(ATTENTION_AND_FFN, nn.ModuleDict({"attention": module}))
        randomize(module)
        return module

    split, single = build(), build()
    parallelize_tensor_attention(split, mesh, replicate_kv_heads=True)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=seeded())
    angles = torch.rand(2, 3, 4, dtype=torch.float64, generator=seeded())
    outputs = [module(x, None, (angles.cos(), angles.sin())) for module in (split, single)]
    torch.testing.assert_close(*outputs, **TOLERANCE)
    for output in outputs:
        output.sin().sum().backward()
    gradients = named_full_gradients(single)
    assert len(gradients) == 8
    assert_close_tree(named_full_gradients(split), gradients, **TOLERANCE)


def test_adapters_of_fused_layers_are_refused_before_anything_is_split():
    params = DeviceMeshParameters(tensor_parallel=2)
    model = nn.ModuleDict({"qkv": LoRALinear(nn.Linear(8, 16), LoRAParameters(r=2, alpha=2, dropout=0.0))})
    plan = ParallelPlan.read({"qkv": "colwise_fused(4, 2, 2)"}, 100, None, None)
    with pytest.raises(ValueError, match=r"qkv, which does not fit: a LoRALinear.*Leave this layer without adapter"):
        resolve_plan(model, plan, params)
