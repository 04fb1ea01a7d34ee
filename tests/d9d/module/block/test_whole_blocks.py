"""What all blocks have in common: late initialisation by the engine, one compiled graph, split backward passes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from d9d.internals.materialize import materialize_module
from d9d.module.block.attention import GroupedQueryAttention, MultiHeadLatentAttention
from d9d.module.block.attention.linear import GatedDeltaNet, LogSigmoidDecayGateParameters, MambaDecayGateParameters
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import (
    ClassificationHead,
    EmbeddingHead,
    SequenceCausalLMHeadShared,
    SequencePoolingHeadShared,
    SplitLanguageModellingHead,
)
from d9d.module.block.moe import MoELayer, SharedExpertParameters
from d9d.module.block.moe.grouped_mm import EagerGroupedMmBackendConfig, TorchGroupedMmBackendConfig
from d9d.module.block.normalization import RMSNorm
from d9d.module.block.positional import RotaryEmbeddingProvider, RotaryEmbeddingStyle
from d9d.pipelining.backward import stage_backward_input, stage_backward_weight
from tests.d9d.module.block.oracles import FP64, randomize

HALF = RotaryEmbeddingStyle.HALF
SHARED = SharedExpertParameters(intermediate_size=8, enable_gate=True)
MAMBA = MambaDecayGateParameters(normalizer=1.0, dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4)
BATCH, TOKENS, HIDDEN = 2, 6, 16

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: RMSNorm(HIDDEN),
    "ffn": lambda: SwiGLU(HIDDEN, 8, bias=True),
    "gqa": lambda: GroupedQueryAttention(
        HIDDEN, 4, 2, 8, 1e-6, True, HALF, enable_output_gate=True, enable_sinks=True, window_size=(2, None), bias=True
    ),
    "mla": lambda: MultiHeadLatentAttention(HIDDEN, 2, 4, 8, 6, 8, 8, 1e-6, True, HALF),
    "delta net": lambda: GatedDeltaNet(HIDDEN, 2, 4, 8, 8, 1e-6, 4, MAMBA),
    "delta net, log sigmoid": lambda: GatedDeltaNet(
        HIDDEN, 2, 2, 8, 8, 1e-6, 4, LogSigmoidDecayGateParameters(normalizer=16.0)
    ),
    "moe": lambda: MoELayer(
        HIDDEN, 8, 4, 2, True, SHARED, grouped_mm_backend=EagerGroupedMmBackendConfig(), enable_expert_bias=True
    ),
    "lm head": lambda: SplitLanguageModellingHead({"regular": 30, "special": 3}, ["regular", "special"], HIDDEN),
    "classification head": lambda: ClassificationHead(HIDDEN, 3, 0.0),
    "embedding head": lambda: EmbeddingHead(HIDDEN, 4, True),
}


POSITION_EMBEDDINGS = {
    dtype: RotaryEmbeddingProvider(10000, 8, TOKENS, HALF).to(dtype)(torch.arange(TOKENS).expand(BATCH, TOKENS))
    for dtype in (torch.float64, torch.float32)
}


def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    match block:
        case GroupedQueryAttention() | MultiHeadLatentAttention():
            return block(x, None, POSITION_EMBEDDINGS[x.dtype])
        case SplitLanguageModellingHead():
            labels = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 2
            return block(x, SequenceCausalLMHeadShared(labels=labels)).cross_entropy
        case ClassificationHead():
            return block(x, SequencePoolingHeadShared()).scores
        case EmbeddingHead():
            return block(x, SequencePoolingHeadShared(pooling_mask=torch.ones(BATCH, TOKENS))).embeddings
        case _:
            return block(x)


def input_states(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("name", [*BLOCKS, "embedding", "rope"])
def test_the_engine_can_initialise_it(name: str):
    others: dict[str, Callable[[], nn.Module]] = {
        "embedding": lambda: SplitTokenEmbeddings({"regular": 7, "special": 2}, ["regular", "special"], 4),
        "rope": lambda: RotaryEmbeddingProvider(10000, 8, TOKENS, HALF),
    }
    build = BLOCKS.get(name) or others[name]
    with torch.device("meta"):
        block = build()
    # Fails if a parameter or buffer is left without a value.
    materialize_module(block, torch.device("cpu"), seed=0)
    tensors = [*block.parameters(), *block.buffers()]
    assert tensors
    assert all(tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize("name", BLOCKS)
def test_pipeline_stages_can_split_its_backward_pass(name: str):
    block = BLOCKS[name]().double()
    randomize(block)
    x = input_states()
    weights = list(block.parameters())
    loss = call(block, x).sin().sum()
    expected = torch.autograd.grad(loss, [x, *weights])
    halves = stage_backward_input([call(block, x).sin().sum()], [None], [x], weights)
    torch.testing.assert_close(halves.input_grads[0], expected[0], **FP64)
    stage_backward_weight(weights, halves.param_groups)
    for weight, gradient in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(weight.grad, gradient, **FP64)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_compiles_as_one_graph(name: str):
    # On CPU torch's grouped product compiles in bf16 only; the eager one asks the host for sizes, which is no graph.
    is_moe = name == "moe"
    dtype = torch.bfloat16 if is_moe else torch.float32
    block: Any = BLOCKS[name]()
    if is_moe:
        block = MoELayer(HIDDEN, 8, 4, 2, True, SHARED, grouped_mm_backend=TorchGroupedMmBackendConfig())
    block.to(dtype)
    x, x2 = input_states(dtype), input_states(dtype)
    torch.compiler.reset()  # the limit of recompilations counts those of other tests
    compiled = torch.compile(functools.partial(call, block), backend="aot_eager", fullgraph=True)
    result, expected = compiled(x), call(block, x2)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
