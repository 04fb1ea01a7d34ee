"""Split blocks: outputs and all gradients of one process, with the whole or a part of the tokens on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.block.attention import GroupedQueryAttention, MultiHeadLatentAttention
from d9d.module.block.attention.sdpa import EagerSdpaBackendConfig, TorchSdpaBackendConfig
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import LM_IGNORE_INDEX, SequenceCausalLMHeadShared, SplitLanguageModellingHead
from d9d.module.block.moe import MoELayer, SharedExpertParameters
from d9d.module.block.normalization import RMSNorm
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.parallelism.api import (
    parallelize_fsdp,
    parallelize_tensor_attention,
    parallelize_tensor_embedding,
    parallelize_tensor_ffn,
    parallelize_tensor_head,
    parallelize_tensor_latent_attention,
    parallelize_tensor_moe,
    parallelize_tensor_norm,
)
from d9d.module.parallelism.tensor_blocks import check_tensor_parallel_heads
from tests.d9d.module.block.oracles import FP64, randomize
from tests.harness.parity import assert_close_tree, named_full_gradients, named_full_parameters, sgd_step

BATCH, TOKENS, HIDDEN, HEAD_DIM = 2, 4, 6, 4
BOTH = pytest.mark.parametrize("sequence_parallel", [False, True])


def tp_mesh(degree: int = 2):
    return DeviceMeshParameters(tensor_parallel=degree).build().mesh_for(DENSE_DOMAIN)["tp"]


def prepared(module: nn.Module) -> nn.Module:
    randomize(module)
    return module.double()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own_tokens(whole: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """What this rank has of a tensor between blocks."""
    part = whole.chunk(dist.get_world_size(), 1)[dist.get_rank()] if sequence_parallel else whole
    return part.detach().clone()


def backward(output: torch.Tensor, whole_grad: torch.Tensor, sequence_parallel: bool) -> None:
    output.backward(own_tokens(whole_grad, sequence_parallel))


def assert_block_equals(split: nn.Module, single: nn.Module, sequence_parallel: bool, *args: object) -> None:
    """Calls both with random states and back-propagates a random gradient."""
    states, grad = random(BATCH, TOKENS, HIDDEN), random(BATCH, TOKENS, HIDDEN, seed=2)
    own, whole = own_tokens(states, sequence_parallel).requires_grad_(), states.requires_grad_()
    output, expected = split(own, *args), single(whole, *args)
    torch.testing.assert_close(output, own_tokens(expected, sequence_parallel), **FP64)
    backward(output, grad, sequence_parallel)
    expected.backward(grad)
    torch.testing.assert_close(own.grad, own_tokens(whole.grad, sequence_parallel), **FP64)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    layouts = [(parameter.placements, parameter.grad.placements) for parameter in split.parameters()]
    assert all(parameter == gradient for parameter, gradient in layouts)


@pytest.mark.world_size(2)
@BOTH
@pytest.mark.parametrize(("width", "bias"), [(8, False), (7, True)])
def test_ffn(sequence_parallel: bool, width: int, bias: bool):
    split, single = (prepared(SwiGLU(HIDDEN, width, bias)) for _ in range(2))
    parallelize_tensor_ffn(split, tp_mesh(), sequence_parallel=sequence_parallel)
    assert_block_equals(split, single, sequence_parallel)


@pytest.mark.world_size(2)
@BOTH
def test_collectives_of_a_block(sequence_parallel: bool):
    """One per direction and kind, as the paper counts."""
    split = prepared(SwiGLU(HIDDEN, 8))
    parallelize_tensor_ffn(split, tp_mesh(), sequence_parallel=sequence_parallel)
    own = own_tokens(random(BATCH, TOKENS, HIDDEN), sequence_parallel).requires_grad_()
    counts = []
    with CommDebugMode() as forward:
        output = split(own)
    counts.append(forward)
    with CommDebugMode() as back:
        output.sum().backward()
    counts.append(back)
    functional = torch.ops.c10d_functional
    kinds = (
        [functional.all_gather_into_tensor, functional.reduce_scatter_tensor]
        if sequence_parallel
        else [functional.all_reduce]
    )
    for count in counts:
        assert dict(count.get_comm_counts()) == dict.fromkeys(kinds, 1)


def attention(num_kv_heads: int, kind: str = "plain") -> GroupedQueryAttention:
    has_all = kind == "all"
    return prepared(
        GroupedQueryAttention(
            HIDDEN,
            4,
            num_kv_heads,
            HEAD_DIM,
            1e-6 if has_all else None,
            is_causal=True,
            rope_style=RotaryEmbeddingStyle.HALF,
            enable_output_gate=has_all,
            enable_sinks=has_all,
            bias=has_all,
            sdpa_backend=EagerSdpaBackendConfig() if has_all else TorchSdpaBackendConfig(),
        )
    )


def positions() -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(BATCH, TOKENS, HEAD_DIM // 2, seed=3).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


@pytest.mark.world_size(2)
@BOTH
@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention(sequence_parallel: bool, kind: str, num_kv_heads: int):
    split, single = (attention(num_kv_heads, kind) for _ in range(2))
    parallelize_tensor_attention(split, tp_mesh(), sequence_parallel=sequence_parallel, replicate_kv_heads=True)
    mask = random(BATCH, 4, TOKENS, TOKENS, seed=4) > -1.0
    mask |= torch.eye(TOKENS, dtype=torch.bool)  # each token sees itself
    assert_block_equals(split, single, sequence_parallel, mask, positions())
    assert split.k_proj.weight.placements == (Shard(0) if num_kv_heads > 1 else Replicate(),)


@pytest.mark.world_size(4)
def test_more_ranks_than_key_and_value_heads():
    split, single = (attention(2, "all") for _ in range(2))
    with pytest.raises(ValueError, match=r"4 query heads and 2 .* tensor_parallel = 4 .* one of 1, 2, or pass repl"):
        parallelize_tensor_attention(split, tp_mesh(4))
    parallelize_tensor_attention(split, tp_mesh(4), replicate_kv_heads=True)
    assert_block_equals(split, single, False, None, positions())


@pytest.mark.world_size(2)
@BOTH
@pytest.mark.parametrize("q_lora_rank", [None, 5])
def test_latent_attention(sequence_parallel: bool, q_lora_rank: int | None):
    split, single = (
        prepared(
            MultiHeadLatentAttention(HIDDEN, 4, 2, 4, 3, 5, q_lora_rank, 1e-6, True, RotaryEmbeddingStyle.INTERLEAVED)
        )
        for _ in range(2)
    )
    parallelize_tensor_latent_attention(split, tp_mesh(), sequence_parallel=sequence_parallel)
    mask = random(BATCH, 4, TOKENS, TOKENS, seed=4) > -1.0
    mask |= torch.eye(TOKENS, dtype=torch.bool)  # each token sees itself
    assert_block_equals(split, single, sequence_parallel, mask, positions())
    with pytest.raises(ValueError, match=r"3 query heads .* can not be shared evenly"):
        parallelize_tensor_latent_attention(
            MultiHeadLatentAttention(HIDDEN, 3, 2, 4, 3, 5, None, 1e-6, True, RotaryEmbeddingStyle.HALF), tp_mesh()
        )


@pytest.mark.world_size(2)
@BOTH
def test_mixture_of_experts(sequence_parallel: bool):
    """Ranks compute alike for the experts that are chosen, whose parameters stay plain."""
    params = SharedExpertParameters(intermediate_size=7, enable_gate=True)
    split, single = (prepared(MoELayer(HIDDEN, 5, 4, 2, True, params)) for _ in range(2))
    parallelize_tensor_moe(split, tp_mesh(), sequence_parallel=sequence_parallel)
    states, grad = random(BATCH, TOKENS, HIDDEN), random(BATCH, TOKENS, HIDDEN, seed=2)
    own, whole = own_tokens(states, sequence_parallel).requires_grad_(), states.requires_grad_()
    output, expected = split(own), single(whole)
    torch.testing.assert_close(output, own_tokens(expected, sequence_parallel), **FP64)
    backward(output, grad, sequence_parallel)
    expected.backward(grad)
    torch.testing.assert_close(own.grad, own_tokens(whole.grad, sequence_parallel), **FP64)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    assert torch.equal(split.tokens_per_expert, single.tokens_per_expert)
    assert split.shared_expert.mlp.up_proj.weight.placements == (Shard(0),)


def test_valid_degrees():
    check_tensor_parallel_heads(12, 6, 3)
    check_tensor_parallel_heads(12, 3, 6, replicate_kv_heads=True)
    with pytest.raises(ValueError, match=r"tensor_parallel to one of 1, 2, 3, 6\.$"):
        check_tensor_parallel_heads(12, 6, 4, replicate_kv_heads=False)
    with pytest.raises(ValueError, match=r"tensor_parallel to one of 1, 2, 3, 6, 12\.$"):
        check_tensor_parallel_heads(12, 6, 4, replicate_kv_heads=True)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_of_parts_of_a_sequence(zero_centered: bool):
    split, single = (prepared(RMSNorm(HIDDEN, zero_centered=zero_centered)) for _ in range(2))
    parallelize_tensor_norm(split, tp_mesh())
    assert_block_equals(split, single, True)


@pytest.mark.world_size(2)
@BOTH
@pytest.mark.parametrize("sizes", [{"all": 13}, {"base": 7, "added": 1}])
def test_embedding(sequence_parallel: bool, sizes: dict[str, int]):
    """Vocabularies that the ranks do not divide; one rank has none of the single added token."""
    split, single = (prepared(SplitTokenEmbeddings(sizes, list(sizes), HIDDEN)) for _ in range(2))
    parallelize_tensor_embedding(split, tp_mesh(), sequence_parallel=sequence_parallel)
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % sum(sizes.values())
    grad = random(BATCH, TOKENS, HIDDEN, seed=2)
    output, expected = split(ids), single(ids)
    torch.testing.assert_close(output, own_tokens(expected, sequence_parallel), **FP64)
    backward(output, grad, sequence_parallel)
    expected.backward(grad)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    if sequence_parallel:
        with pytest.raises(ValueError, match=r"cuts 3 tokens into 2 equal parts. Pad .* such as 4"):
            split(ids[:, :3])


@pytest.mark.world_size(2)
@BOTH
@pytest.mark.parametrize("sizes", [{"all": 13}, {"base": 7, "added": 1}])
def test_head(sequence_parallel: bool, sizes: dict[str, int]):
    split, single = (prepared(SplitLanguageModellingHead(sizes, list(sizes), HIDDEN)) for _ in range(2))
    parallelize_tensor_head(split, tp_mesh(), sequence_parallel=sequence_parallel)
    labels = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % sum(sizes.values())
    labels[0, 1] = LM_IGNORE_INDEX
    labels[1, 2] = sum(sizes.values()) - 1
    states, grad = random(BATCH, TOKENS, HIDDEN), random(BATCH, TOKENS, seed=2)
    own, whole = own_tokens(states, sequence_parallel).requires_grad_(), states.requires_grad_()
    losses = split(own, SequenceCausalLMHeadShared(labels=labels)).cross_entropy
    logits = single.logits(whole)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=LM_IGNORE_INDEX
    ).view(labels.shape)
    torch.testing.assert_close(losses, expected, **FP64)
    losses.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(own.grad, own_tokens(whole.grad, sequence_parallel), **FP64)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    torch.testing.assert_close(split.logits(own.detach()), logits, **FP64)


@pytest.mark.world_size(2)
def test_a_label_outside_the_vocabulary_has_an_infinite_loss():
    """As on one process; nor do other tokens notice."""
    split, single = (prepared(SplitLanguageModellingHead({"all": 5}, ["all"], HIDDEN)) for _ in range(2))
    parallelize_tensor_head(split, tp_mesh())
    shared = SequenceCausalLMHeadShared(labels=torch.tensor([[4, 5, 0]]))
    states = random(1, 3, HIDDEN)
    losses, expected = split(states, shared).cross_entropy, single(states, shared).cross_entropy
    assert losses[0, 1] == torch.inf
    torch.testing.assert_close(losses[0, ::2], expected[0, ::2], **FP64)


class Tiny(nn.Module):
    """Embedding, a block with residuals, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = SplitTokenEmbeddings({"all": 13}, ["all"], HIDDEN)
        self.attention_norm, self.ffn_norm, self.norm = (RMSNorm(HIDDEN) for _ in range(3))
        self.attention = attention(2, "all")
        self.ffn = SwiGLU(HIDDEN, 8)
        self.head = SplitLanguageModellingHead({"all": 13}, ["all"], HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(input_ids=ids)
        normed = self.attention_norm(states)
        states = states + self.attention(hidden_states=normed, attention_mask=None, position_embeddings=positions())
        states = states + self.ffn(self.ffn_norm(states))
        shared = SequenceCausalLMHeadShared(labels=ids.roll(-1, 1))
        return self.head(hidden_states=self.norm(states), shared=shared).cross_entropy


def tie(model: Tiny) -> None:
    model.head.lm_head["all"].weight = model.embedding.token_embedding["all"].weight


def split_model(model: Tiny, mesh: object, sequence_parallel: bool) -> None:
    parallelize_tensor_embedding(model.embedding, mesh, sequence_parallel=sequence_parallel)
    parallelize_tensor_attention(model.attention, mesh, sequence_parallel=sequence_parallel)
    parallelize_tensor_ffn(model.ffn, mesh, sequence_parallel=sequence_parallel)
    parallelize_tensor_head(model.head, mesh, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        for norm in (model.attention_norm, model.ffn_norm, model.norm):
            parallelize_tensor_norm(norm, mesh)


def ids_of(data_rank: int) -> torch.Tensor:
    return torch.randint(0, 13, (BATCH, TOKENS), generator=torch.Generator().manual_seed(data_rank))


@pytest.mark.world_size(2)
@BOTH
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model(sequence_parallel: bool, is_tied: bool):
    split, single = (prepared(Tiny()) for _ in range(2))
    split_model(split, tp_mesh(), sequence_parallel)
    if is_tied:
        tie(split)
        tie(single)
    for _ in range(2):
        losses, expected = split(ids_of(0)), single(ids_of(0))
        torch.testing.assert_close(losses, expected, **FP64)
        losses.sum().backward()
        expected.sum().backward()
        assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
        for model in (split, single):
            sgd_step(model)
            model.zero_grad()
        assert_close_tree(named_full_parameters(split), named_full_parameters(single), **FP64)


@pytest.mark.world_size(4)
@BOTH
def test_shards_of_a_split_model(sequence_parallel: bool):
    context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    split, single = (prepared(Tiny()) for _ in range(2))
    split_model(split, mesh["tp"], sequence_parallel)
    parallelize_fsdp(split.ffn, mesh["dp_cp_shard"])
    parallelize_fsdp(split, mesh["dp_cp_shard"])
    synchronizer = GradientSynchronizer([list(split.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    losses = split(ids_of(context.dp_rank))
    losses.sum().backward()
    synchronizer.wait()
    for rank in range(2):
        expected = single(ids_of(rank))
        expected.sum().backward()
        if rank == context.dp_rank:
            torch.testing.assert_close(losses, expected, **FP64)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    assert local_tensor(split.ffn.up_proj.weight).numel() == 8 * HIDDEN // 4
