"""Attention over parts of sequences: outputs and all gradients of one process, whatever layers ask for."""

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.protocol import MixesTokens
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.block.attention import GroupedQueryAttention, MultiHeadLatentAttention
from d9d.module.block.attention.linear import GatedDeltaNet, LogSigmoidDecayGateParameters
from d9d.module.block.attention.sdpa import (
    EagerSdpaBackendConfig,
    TorchSdpaBackendConfig,
    TorchSdpaBackendType,
)
from d9d.module.block.head import ClassificationHead, EmbeddingHead, SequencePoolingHeadShared
from d9d.module.block.moe import MoELayer
from d9d.module.block.positional import RotaryEmbeddingProvider, RotaryEmbeddingStyle
from d9d.module.model import ClassificationHeadConfig, DecoderForClassification
from d9d.module.parallelism.api import (
    SequenceSharding,
    document_ids,
    document_mask,
    parallelize_context,
    parallelize_replicate,
    parallelize_tensor_attention,
)
from tests.d9d.module.block.oracles import FP64, randomize
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.harness.parity import assert_close_tree, named_full_gradients

BATCH, TOKENS, HIDDEN, HEAD_DIM = 2, 16, 6, 4
BF16 = {"rtol": 0.05, "atol": 0.05}  # roundings to 2**-8 in a block, at other places than on one process
HALF = RotaryEmbeddingStyle.HALF
BOTH_METHODS = pytest.mark.parametrize("method", ["ring", "all_gather"])
BOTH_ORDERS = pytest.mark.parametrize("order", ["zigzag", "contiguous"])

GQA = {
    "plain": {},
    "all": {"qk_norm_eps": 1e-6, "enable_output_gate": True, "enable_sinks": True, "bias": True},
    "eager": {"sdpa_backend": EagerSdpaBackendConfig()},
    "window": {"window_size": (2, None)},
    "wide window and sinks": {"window_size": (5, None), "enable_sinks": True},
    "all see all": {"is_causal": False},
    "window to both sides": {"is_causal": False, "window_size": (3, 1)},
    "one key head": {"num_key_value_heads": 1},
}


def attention(kind: str) -> nn.Module:
    if kind == "latent":
        module: nn.Module = MultiHeadLatentAttention(HIDDEN, 2, 3, HEAD_DIM, 5, 4, 3, 1e-6, True, HALF)
    else:
        fields = {"num_key_value_heads": 2, "qk_norm_eps": None, "is_causal": True, **GQA[kind]}
        module = GroupedQueryAttention(HIDDEN, 4, head_dim=HEAD_DIM, rope_style=HALF, **fields)
    randomize(module)
    return module.double()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rope(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return RotaryEmbeddingProvider(100.0, HEAD_DIM, TOKENS, HALF).double()(position_ids)


def mask_of(kind: str, sharding: SequenceSharding) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask on one process, and that of this rank."""
    match kind:
        case "none":
            return None, None
        case "documents":
            ids = torch.stack((document_ids((3, 1, 8, 4)), document_ids((7, 6), TOKENS)))
            return document_mask(ids, ids), document_mask(sharding.shard(ids), ids)
        case "padding":
            mask = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [5]]))[:, None, None, :]
            return mask, mask
        case "per head":
            mask = random(BATCH, 4, TOKENS, TOKENS, seed=4) > -0.5
            mask[0, 0, 3] = False  # a query that sees nothing
            mask[..., 0] |= torch.arange(TOKENS) != 3
        case _:
            mask = random(1, 1, TOKENS, TOKENS, seed=4)
    return mask, sharding.shard(mask, dim=2)


def cp_mesh(degree: int) -> DeviceMesh:
    """Ranks of one sequence; both kinds of context parallelism in turn, as attention can not tell."""
    kind = "context_parallel_shard" if degree > 2 else "context_parallel_replicate"
    return DeviceMeshParameters(**{kind: degree}).build().mesh_for(BATCH_DOMAIN)["cp"]


def summed(parts: list[torch.Tensor | None]) -> None:
    for part in parts:
        dist.all_reduce(part)


def assert_equals_one_process(kind: str, mask_kind: str, mesh: DeviceMesh, method: str, order: str) -> None:
    split, single = (attention(kind) for _ in range(2))
    parallelize_context(split, mesh, method=method, order=order)
    sharding = SequenceSharding.over(mesh, order)
    whole_mask, own_mask = mask_of(mask_kind, sharding)
    states, grad = random(BATCH, TOKENS, HIDDEN), random(BATCH, TOKENS, HIDDEN, seed=2)
    own = sharding.shard(states).clone().requires_grad_()
    states.requires_grad_()
    expected = single(states, whole_mask, rope(torch.arange(TOKENS).view(1, TOKENS)))
    output = split(own, own_mask, rope(sharding.position_ids(TOKENS)))
    torch.testing.assert_close(output, sharding.shard(expected), **FP64)
    expected.backward(grad)
    output.backward(sharding.shard(grad))
    torch.testing.assert_close(own.grad, sharding.shard(states.grad), **FP64)
    summed([parameter.grad for parameter in split.parameters()])
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
@BOTH_METHODS
@BOTH_ORDERS
def test_two_ranks(method: str, order: str):
    mesh = cp_mesh(2)
    for kind in (*GQA, "latent"):
        assert_equals_one_process(kind, "none", mesh, method, order)
    for mask_kind in ("documents", "padding", "per head", "terms"):
        assert_equals_one_process("all", mask_kind, mesh, method, order)
    assert_equals_one_process("window", "documents", mesh, method, order)
    assert_equals_one_process("all see all", "padding", mesh, method, order)


@pytest.mark.world_size(4)
@BOTH_METHODS
@BOTH_ORDERS
def test_four_ranks(method: str, order: str):
    mesh = cp_mesh(4)
    for kind in ("all", "window", "window to both sides", "latent"):
        assert_equals_one_process(kind, "none", mesh, method, order)
    assert_equals_one_process("all", "documents", mesh, method, order)


@pytest.mark.world_size(2)
def test_names_and_layouts():
    """Checkpoints and mappers see the same parameters."""
    split, single = attention("all"), attention("all")
    parallelize_context(split, cp_mesh(2))
    assert list(split.state_dict()) == list(single.state_dict())
    assert list(copy.deepcopy(split).state_dict()) == list(single.state_dict())
    split.reset_parameters()
    assert split.sdpa.sinks.logits.eq(0).all()


@pytest.mark.world_size(4)
@BOTH_METHODS
@pytest.mark.parametrize("is_split_first", [False, True])
def test_with_tensor_parallelism(method: str, is_split_first: bool):
    """Heads over one dimension, tokens over the other; sinks and per-head masks go with the heads."""
    context = DeviceMeshParameters(context_parallel_shard=2, tensor_parallel=2).build()
    mesh, tensor_mesh = context.mesh_for(BATCH_DOMAIN)["cp"], context.mesh_for(DENSE_DOMAIN)["tp"]
    split, single = attention("all"), attention("all")
    if is_split_first:
        parallelize_tensor_attention(split, tensor_mesh)
    parallelize_context(split, mesh, method=method)
    if not is_split_first:
        parallelize_tensor_attention(split, tensor_mesh)
    sharding = SequenceSharding.of(context)
    whole_mask, own_mask = mask_of("per head", sharding)
    states, grad = random(BATCH, TOKENS, HIDDEN), random(BATCH, TOKENS, HIDDEN, seed=2)
    expected = single(states, whole_mask, rope(torch.arange(TOKENS).view(1, TOKENS)))
    output = split(sharding.shard(states), own_mask, rope(sharding.position_ids(TOKENS)))
    torch.testing.assert_close(output, sharding.shard(expected), **FP64)
    expected.backward(grad)
    output.backward(sharding.shard(grad))
    for parameter in split.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group())
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)


class Layer(nn.Module):
    """A norm, attention and a residual, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.attention = attention("all")
        randomize(self)

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        def body(states: torch.Tensor) -> torch.Tensor:
            return states + self.attention(self.norm(states), None, rope(position_ids))

        return checkpoint(body, states, use_reentrant=False)


@pytest.mark.world_size(4)
@BOTH_METHODS
@pytest.mark.parametrize(
    "degrees",
    [
        {"context_parallel_replicate": 4},
        {"context_parallel_replicate": 2, "data_parallel_replicate": 2},
        {"context_parallel_replicate": 2, "context_parallel_shard": 2},
    ],
    ids=str,
)
def test_replicated_weights_are_summed_over_context_parallel_ranks(method: str, degrees: dict[str, int]):
    """Norm weights are where this goes wrong: whole on every rank, but each sees its tokens alone."""
    context = DeviceMeshParameters(**degrees).build()
    model, single = Layer(), Layer()
    parallelize_context(model, context.mesh_for(BATCH_DOMAIN)["cp"], method=method)
    parallelize_replicate(model, context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard", "cp_replicate"])
    synchronizer = GradientSynchronizer([list(model.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    sharding = SequenceSharding.of(context)
    batches = [random(BATCH, TOKENS, HIDDEN, seed=10 + rank) for rank in range(context.dp_size)]
    own = sharding.shard(batches[context.dp_rank])
    model(own, sharding.position_ids(TOKENS)).sin().sum().backward()
    synchronizer.wait()
    for batch in batches:
        single(batch, torch.arange(TOKENS).view(1, TOKENS)).sin().sum().backward()
    assert_close_tree(named_full_gradients(model), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
@BOTH_METHODS
def test_sixteen_bits(method: str):
    """States in 16 bits, or weights in 32 with autocast around."""
    sharding = SequenceSharding.over(cp_mesh(2))
    states = random(BATCH, TOKENS, HIDDEN).bfloat16()
    for is_autocast in (False, True):
        split, single = attention("all"), attention("all")
        parallelize_context(split, cp_mesh(2), method=method)
        dtype = torch.float32 if is_autocast else torch.bfloat16
        outputs = []
        for module, own in ((single.to(dtype), states), (split.to(dtype), sharding.shard(states))):
            positions = tuple(part.to(dtype) for part in rope(torch.arange(TOKENS).view(1, TOKENS)))
            if module is split:
                positions = tuple(sharding.shard(part) for part in positions)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                outputs.append(module(own.to(dtype), None, positions))
            outputs[-1].float().sin().sum().backward()
        torch.testing.assert_close(outputs[1], sharding.shard(outputs[0]), **BF16)
        assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
        summed([parameter.grad for parameter in split.parameters()])
        assert_close_tree(named_full_gradients(split), named_full_gradients(single), **BF16)


class CountsCommunication(TorchDispatchMode):
    """Counts what goes to the process group: `CommDebugMode` does not know sends."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.world_size(4)
def test_messages_of_a_layer():
    """Ring of R ranks: R - 1 transfers of keys in each direction of autograd, and R of gradients. Gathering: one and two."""
    own = random(BATCH, TOKENS // 4, HIDDEN)
    expected = {
        "ring": ({"send": 3, "recv_": 3}, {"send": 3 + 4, "recv_": 3 + 4}),
        "all_gather": ({"_allgather_base_": 1}, {"_allgather_base_": 1, "_reduce_scatter_base_": 1}),
    }
    for method, counts in expected.items():
        split = attention("all")
        parallelize_context(split, cp_mesh(4), method=method)
        positions = rope(SequenceSharding.over(cp_mesh(4)).position_ids(TOKENS))
        with CountsCommunication() as forward:
            output = split(own, None, positions)
        with CountsCommunication() as back:
            output.sum().backward()
        assert (dict(forward.counts), dict(back.counts)) == counts
        with torch.no_grad(), CountsCommunication() as inference:
            split(own, None, positions)
        assert inference.counts == forward.counts


@pytest.mark.world_size(2)
def test_compiled_blocks():
    """Traces end at the attention itself."""
    split, single = attention("all"), attention("all")
    parallelize_context(split, cp_mesh(2))
    sharding = SequenceSharding.over(cp_mesh(2))
    split.compile(backend="aot_eager")
    states = random(BATCH, TOKENS, HIDDEN)
    output = split(sharding.shard(states), None, rope(sharding.position_ids(TOKENS)))
    expected = single(states, None, rope(torch.arange(TOKENS).view(1, TOKENS)))
    torch.testing.assert_close(output, sharding.shard(expected), **FP64)
    output.sin().sum().backward()
    expected.sin().sum().backward()
    summed([parameter.grad for parameter in split.parameters()])
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
def test_frozen_parts():
    """Gradients of what is trained do not depend on what is not; all ranks leave out the same."""
    split, single = attention("all"), attention("all")
    parallelize_context(split, cp_mesh(2))
    sharding = SequenceSharding.over(cp_mesh(2))
    states = random(BATCH, TOKENS, HIDDEN)
    for module in (split, single):
        module.requires_grad_(False)
        module.v_proj.requires_grad_(True)
    split(sharding.shard(states), None, rope(sharding.position_ids(TOKENS))).sin().sum().backward()
    single(states, None, rope(torch.arange(TOKENS).view(1, TOKENS))).sin().sum().backward()
    summed([split.v_proj.weight.grad, split.v_proj.bias.grad])
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
def test_one_rank_of_each_sequence_changes_nothing():
    module = attention("plain")
    backend = module.sdpa
    parallelize_context(module, DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(BATCH_DOMAIN)["cp"])
    assert module.sdpa is backend


@pytest.mark.world_size(2)
def test_what_is_refused():
    mesh = cp_mesh(2)
    gate = LogSigmoidDecayGateParameters(normalizer=16.0)
    linear = nn.ModuleDict({"mixer": GatedDeltaNet(HIDDEN, 2, 2, 4, 4, 1e-6, 2, gate), "attention": attention("plain")})
    with pytest.raises(NotImplementedError, match="mixer is a gated delta net: its state passes from token to token"):
        parallelize_context(linear, mesh)
    assert not any("ContextParallel" in type(child).__name__ for child in linear.modules())
    with pytest.raises(ValueError, match="Linear holds no attention"):
        parallelize_context(nn.Linear(1, 1), mesh)
    with pytest.raises(ValueError, match="'ulysses' is not a valid ContextParallelMethod"):
        parallelize_context(attention("plain"), mesh, method="ulysses")
    module = attention("plain")
    parallelize_context(module, mesh)
    with pytest.raises(ValueError, match="GroupedQueryAttention is split over context-parallel ranks already"):
        parallelize_context(module, mesh)

    def call(num_tokens: int, mask: torch.Tensor | None = None) -> None:
        module(random(1, num_tokens, HIDDEN), mask, rope(torch.arange(num_tokens).view(1, -1)))

    with pytest.raises(ValueError, match=r"6 tokens can not be cut into 4 .* such as 4 or 8"):
        call(3)
    for shape in ((1, 1, 8, 8), (1, 1, 4, 4), (1, 1, 2, 8)):
        with pytest.raises(ValueError, match=r"needs 4 rows, .* and 8 columns.* Cut the rows alone"):
            call(4, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="must broadcast to"):
        call(4, torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="mask that is trained"):
        call(4, torch.zeros(1, 1, 1, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("head", [ClassificationHead(HIDDEN, 3, 0.0), EmbeddingHead(HIDDEN, 3, normalize=True)])
def test_pooling(head: nn.Module):
    """Each rank pools whole sequences; gradients are those of the mean of the ranks' losses."""
    mesh = cp_mesh(2)
    split, single = copy.deepcopy(head).double(), copy.deepcopy(head).double()
    for module in (split, single):
        randomize(module)
    parallelize_context(split, mesh)
    sharding = SequenceSharding.over(mesh)
    states = random(BATCH, TOKENS, HIDDEN).requires_grad_()
    own = sharding.shard(states).detach().requires_grad_()
    mask = random(BATCH, TOKENS, seed=5) > 0.0
    mask[0] = False  # a sequence without any token that counts
    mask[1, : TOKENS // 4] = False
    per_token = split(own, SequencePoolingHeadShared())
    torch.testing.assert_close(
        *(sharding.gather(each) for each in field_values(per_token)),
        *field_values(single(states, SequencePoolingHeadShared())),
        **FP64,
    )
    (pooled,) = field_values(copy.deepcopy(split)(own, SequencePoolingHeadShared(pooling_mask=sharding.shard(mask))))
    (expected,) = field_values(single(states, SequencePoolingHeadShared(pooling_mask=mask)))
    torch.testing.assert_close(pooled, expected, **FP64)
    (split_pooled,) = field_values(split(own, SequencePoolingHeadShared(pooling_mask=sharding.shard(mask))))
    (split_pooled.sin().sum() / 2).backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(own.grad, sharding.shard(states.grad), **FP64)
    for parameter, other in zip(split.parameters(), single.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, other.grad, **FP64)


@pytest.mark.world_size(2)
def test_what_pools_is_found_where_layers_are_split_one_by_one():
    """By the attribute that the native loop asks for: a head that nobody has told would average over parts."""
    backbone = CATALOGUE["qwen3 dense"].build(False, mode="mean")
    model = DecoderForClassification(backbone, ClassificationHeadConfig(num_labels=3), backbone.stage)
    for layer in backbone.decoder_layers:
        parallelize_context(layer, cp_mesh(2))
    degrees = {
        name: module.context_parallel_degree
        for name, module in model.named_modules()
        if isinstance(module, MixesTokens)
    }
    assert [name for name, degree in degrees.items() if degree == 1] == ["backbone.token_mean", "head.pooling"]


def field_values(output: Any) -> list[torch.Tensor]:
    return [getattr(output, field.name) for field in dataclasses.fields(output)]


@pytest.mark.world_size(2)
def test_attention_of_other_kinds_is_refused_beside_what_counts_tokens():
    """Such as kernels for whole sequences, that nothing would tell of other ranks; and nothing is changed before."""

    class OtherKernel(nn.Module):
        context_parallel_degree: int = 1

    first, second = attention("plain"), attention("plain")
    backend = first.sdpa
    second.sdpa = OtherKernel()
    model = nn.ModuleDict({"first": first, "second": second, "moe": MoELayer(HIDDEN, 3, 2, 1, True)})
    with pytest.raises(NotImplementedError, match=r"second\.sdpa \(OtherKernel\) can not see .* torch or eager"):
        parallelize_context(model, cp_mesh(2))
    assert first.sdpa is backend
    assert model["moe"].context_parallel_degree is None


@pytest.mark.world_size(2)
def test_kernels_that_a_layer_allows():
    mesh = cp_mesh(2)
    for config, allows_fused in (
        (EagerSdpaBackendConfig(), False),
        (TorchSdpaBackendConfig(), True),
        (TorchSdpaBackendConfig(backends=[TorchSdpaBackendType.MATH]), False),
        (TorchSdpaBackendConfig(backends=[TorchSdpaBackendType.FLASH_ATTENTION]), True),
    ):
        module = GroupedQueryAttention(HIDDEN, 4, 2, HEAD_DIM, None, True, HALF, sdpa_backend=config)
        parallelize_context(module, mesh)
        assert module.sdpa._allows_fused == allows_fused
