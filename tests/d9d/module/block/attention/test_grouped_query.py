"""Grouped-query attention against Llama, Qwen3, Qwen3-Next and gpt-oss of transformers, forward and backward."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.attention.sdpa import AnySdpaBackendConfig, EagerSdpaBackendConfig, TorchSdpaBackendConfig
from d9d.module.block.positional import RotaryEmbeddingProvider, RotaryEmbeddingStyle
from tests.d9d.module.block.oracles import (
    FP32_SUMS,
    FP64,
    EverythingInDouble,
    assert_equal_gradients,
    copy_parameters,
    randomize,
)

HALF = RotaryEmbeddingStyle.HALF
BACKENDS = [EagerSdpaBackendConfig(), TorchSdpaBackendConfig()]
SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
THETA = 10000
POSITION_IDS = torch.tensor([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]])
NUM_TOKENS = 6
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def causal_mask(window: int | None = None) -> torch.Tensor:
    """Terms for the logits, as transformers makes them: ``(1, 1, T, T)``."""
    positions = torch.arange(NUM_TOKENS)
    distance = positions[:, None] - positions[None]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.float64).masked_fill(hidden, -math.inf)


def position_embeddings(rope_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return RotaryEmbeddingProvider(THETA, rope_dim, 16, HALF).to(dtype)(POSITION_IDS)


def compare(theirs: nn.Module, ours: nn.Module, names: Mapping[str, str], rope_dim: int, window: int | None = None):
    """Both in fp64 (theirs without its roundings to fp32) and in fp32, outputs and all gradients."""
    randomize(theirs)
    for dtype, tolerance in ((torch.float64, FP64), (torch.float32, FP32_SUMS)):
        theirs.to(dtype).zero_grad()
        ours.to(dtype).zero_grad()
        copy_parameters(theirs, ours, names)
        generator = torch.Generator().manual_seed(1)
        states = torch.randn(2, NUM_TOKENS, 12, generator=generator, dtype=torch.float64)
        x, x2 = (states.to(dtype).clone().requires_grad_() for _ in range(2))
        embeddings = position_embeddings(rope_dim, dtype)
        if dtype == torch.float64:
            with EverythingInDouble():
                expected = theirs(x2, position_embeddings=embeddings, attention_mask=causal_mask(window))[0]
        else:
            expected = theirs(x2, position_embeddings=embeddings, attention_mask=causal_mask(window).to(dtype))[0]
        result = ours(x, None, embeddings)
        torch.testing.assert_close(result, expected, **tolerance)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        torch.testing.assert_close(x.grad, x2.grad, **tolerance)
        assert_equal_gradients(theirs, ours, names, tolerance)


def weights_of(*modules: str, bias: bool = False) -> dict[str, str]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{module}.{kind}": f"{module}.{kind}" for module in modules for kind in kinds}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda config: config.kind)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_llama(backend: AnySdpaBackendConfig, bias: bool):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(**SIZES, attention_bias=bias, attn_implementation="eager")
    ours = GroupedQueryAttention(
        **SIZES, qk_norm_eps=None, is_causal=True, rope_style=HALF, sdpa_backend=backend, bias=bias
    )
    compare(llama.LlamaAttention(config, 0), ours, weights_of(*PROJECTIONS, bias=bias), rope_dim=8)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda config: config.kind)
@pytest.mark.parametrize("window", [None, 3])
def test_equals_qwen3(backend: AnySdpaBackendConfig, window: int | None):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = qwen3.Qwen3Config(**SIZES, rms_norm_eps=1e-5, attn_implementation="eager")
    ours = GroupedQueryAttention(
        **SIZES,
        qk_norm_eps=1e-5,
        is_causal=True,
        rope_style=HALF,
        sdpa_backend=backend,
        window_size=(None if window is None else window - 1, None),
    )
    names = weights_of(*PROJECTIONS, "q_norm", "k_norm")
    compare(qwen3.Qwen3Attention(config, 0), ours, names, rope_dim=8, window=window)


class SplitGate(nn.Module):
    """Qwen3-Next with its fused projection of queries and gates cut into our two: per head, queries then gates."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.unregistered = [attention]  # its parameters belong to this module
        self.q_proj, self.gate_proj = (nn.Linear(12, 32, bias=False) for _ in range(2))
        for name in ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            setattr(self, name, getattr(attention, name))
        del attention.q_proj

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        heads = [part.weight.view(4, 8, 12) for part in (self.q_proj, self.gate_proj)]
        fused = torch.cat(heads, dim=1).reshape(64, 12)
        (attention,) = self.unregistered
        attention.q_proj = lambda states: states @ fused.T
        return attention(x, **kwargs)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda config: config.kind)
def test_gate_partial_rope_and_zero_centered_norms_equal_qwen3_next(backend: AnySdpaBackendConfig):
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen3_next.Qwen3NextConfig(**SIZES, rms_norm_eps=1e-5, attn_implementation="eager")
    theirs = SplitGate(qwen3_next.Qwen3NextAttention(config, 0))
    ours = GroupedQueryAttention(
        **SIZES,
        qk_norm_eps=1e-5,
        is_causal=True,
        rope_style=HALF,
        rope_dim=2,
        enable_output_gate=True,
        qk_norm_zero_centered=True,
        sdpa_backend=backend,
    )
    names = weights_of(*PROJECTIONS, "q_norm", "k_norm", "gate_proj")
    compare(theirs, ours, names, rope_dim=2)


class GptOssRope(nn.Module):
    """gpt-oss wants cosines of half the dimensions, which it spreads itself."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: Any) -> Any:
        cos, sin = (table[..., :4] for table in position_embeddings)
        return self.attention(x, position_embeddings=(cos, sin), **kwargs)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda config: config.kind)
def test_sinks_equal_gpt_oss(backend: AnySdpaBackendConfig):
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = gpt_oss.GptOssConfig(**SIZES, attention_bias=True, attn_implementation="eager")
    theirs = GptOssRope(gpt_oss.GptOssAttention(config, 0))
    ours = GroupedQueryAttention(
        **SIZES,
        qk_norm_eps=None,
        is_causal=True,
        rope_style=HALF,
        sdpa_backend=backend,
        enable_sinks=True,
        window_size=(2, None),
        bias=True,
    )
    names = {f"attention.{name}": name for name in weights_of(*PROJECTIONS, bias=True)}
    compare(theirs, ours, names | {"attention.sinks": "sdpa.sinks.logits"}, rope_dim=8, window=3)


def test_a_mask_adds_to_causality():
    layer = GroupedQueryAttention(**SIZES, qk_norm_eps=1e-6, is_causal=True, rope_style=HALF).double()
    x = torch.randn(2, NUM_TOKENS, 12, dtype=torch.float64)
    embeddings = position_embeddings(8, torch.float64)
    mask = torch.ones(2, 1, 1, NUM_TOKENS, dtype=torch.bool)
    mask[..., 4:] = False
    result = layer(x, mask, embeddings)
    changed = x.clone()
    changed[:, 4:] += 1.0  # what no other token sees
    assert torch.equal(layer(changed, mask, embeddings)[:, :4], result[:, :4])
    torch.testing.assert_close(result[:, :4], layer(x, None, embeddings)[:, :4], **FP64)


def test_late_init():
    with torch.device("meta"):
        layer = GroupedQueryAttention(
            **SIZES, qk_norm_eps=1e-6, is_causal=True, rope_style=HALF, enable_output_gate=True, enable_sinks=True
        )
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    layer.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_mistakes_are_named():
    with pytest.raises(
        ValueError, match=r"\(6\) must be a positive multiple of num_key_value_heads \(4\).*\[1, 2, 3, 6\]"
    ):
        GroupedQueryAttention(12, 6, 4, 8, None, True, HALF)
    with pytest.raises(ValueError, match=r"rope_dim \(10\)"):
        GroupedQueryAttention(12, 4, 4, 8, None, True, HALF, rope_dim=10)
    layer = GroupedQueryAttention(**SIZES, qk_norm_eps=None, is_causal=True, rope_style=HALF, rope_dim=4)
    with pytest.raises(ValueError, match="have 8 dimensions, the layer rotates 4"):
        layer(torch.randn(2, NUM_TOKENS, 12), None, position_embeddings(8, torch.float32))
