"""Multi-head latent attention against DeepSeek-V3 of transformers, forward and backward."""

import pytest
import torch

from d9d.module.block.attention import LowRankProjection, MultiHeadLatentAttention
from d9d.module.block.attention.sdpa import AnySdpaBackendConfig, EagerSdpaBackendConfig, TorchSdpaBackendConfig
from d9d.module.block.positional import RotaryEmbeddingProvider, RotaryEmbeddingStyle
from d9d.module.block.positional.scaling import yarn_mscale
from tests.d9d.module.block.attention.test_grouped_query import POSITION_IDS, THETA, causal_mask
from tests.d9d.module.block.oracles import (
    FP32_SUMS,
    FP64,
    EverythingInDouble,
    assert_equal_gradients,
    copy_parameters,
    randomize,
)

SIZES = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "kv_lora_rank": 7,
}
NAMES = {
    "kv_a_proj_with_mqa.weight": "kv_down_proj.weight",
    "kv_a_layernorm.weight": "kv_norm.weight",
    "kv_b_proj.weight": "kv_up_proj.weight",
    "o_proj.weight": "o_proj.weight",
}
LOW_RANK_NAMES = {
    "q_a_proj.weight": "q_proj.down_proj.weight",
    "q_a_layernorm.weight": "q_proj.norm.weight",
    "q_b_proj.weight": "q_proj.up_proj.weight",
}


@pytest.mark.parametrize(
    "backend", [EagerSdpaBackendConfig(), TorchSdpaBackendConfig()], ids=lambda config: config.kind
)
@pytest.mark.parametrize("q_lora_rank", [None, 9])
@pytest.mark.parametrize("style", list(RotaryEmbeddingStyle))
@pytest.mark.parametrize("is_stretched", [False, True])
def test_equals_deepseek_v3(
    backend: AnySdpaBackendConfig, q_lora_rank: int | None, style: RotaryEmbeddingStyle, is_stretched: bool
):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = deepseek.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=3,
        q_lora_rank=q_lora_rank,
        rope_interleave=style == RotaryEmbeddingStyle.INTERLEAVED,
        max_position_embeddings=16,
        rope_parameters={"rope_theta": float(THETA), "original_max_position_embeddings": 4, **yarn}
        if is_stretched
        else {"rope_theta": float(THETA), "rope_type": "default"},
        attn_implementation="eager",
    )
    theirs = deepseek.DeepseekV3Attention(config, 0)
    ours = MultiHeadLatentAttention(
        **SIZES,
        q_lora_rank=q_lora_rank,
        qk_down_norm_eps=1e-6,
        is_causal=True,
        rope_style=style,
        sdpa_backend=backend,
        softmax_scale=10**-0.5 * yarn_mscale(4.0, 1.0) ** 2 if is_stretched else None,
    )
    assert ours.q_lora_rank == q_lora_rank
    names = NAMES | ({"q_proj.weight": "q_proj.weight"} if q_lora_rank is None else LOW_RANK_NAMES)
    randomize(theirs)
    for dtype, tolerance in ((torch.float64, FP64), (torch.float32, FP32_SUMS)):
        theirs.to(dtype).zero_grad()
        ours.to(dtype).zero_grad()
        copy_parameters(theirs, ours, names)
        states = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x, x2 = (states.to(dtype).clone().requires_grad_() for _ in range(2))
        # Theirs takes angles in halves for both styles.
        half = RotaryEmbeddingProvider(THETA, 4, 16, RotaryEmbeddingStyle.HALF).to(dtype)(POSITION_IDS)
        own = RotaryEmbeddingProvider(THETA, 4, 16, style).to(dtype)(POSITION_IDS)
        if dtype == torch.float64:
            with EverythingInDouble():
                expected = theirs(x2, position_embeddings=half, attention_mask=causal_mask())[0]
        else:
            expected = theirs(x2, position_embeddings=half, attention_mask=causal_mask().to(dtype))[0]
        result = ours(x, None, own)
        torch.testing.assert_close(result, expected, **tolerance)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        torch.testing.assert_close(x.grad, x2.grad, **tolerance)
        assert_equal_gradients(theirs, ours, names, tolerance)


def test_low_rank_projection():
    projection = LowRankProjection(4, 2, 3, 0.0).double()
    randomize(projection)
    x = torch.randn(5, 4, dtype=torch.float64)
    low = x @ projection.down_proj.weight.T
    normalized = low / low.square().mean(-1, keepdim=True).sqrt() * projection.norm.weight
    torch.testing.assert_close(projection(x), normalized @ projection.up_proj.weight.T, **FP64)


@pytest.mark.parametrize("q_lora_rank", [None, 9])
def test_late_init(q_lora_rank: int | None):
    with torch.device("meta"):
        layer = MultiHeadLatentAttention(
            **SIZES,
            q_lora_rank=q_lora_rank,
            qk_down_norm_eps=1e-6,
            is_causal=True,
            rope_style=RotaryEmbeddingStyle.HALF,
        )
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    layer.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_position_embeddings_of_another_size_are_refused():
    layer = MultiHeadLatentAttention(
        **SIZES, q_lora_rank=None, qk_down_norm_eps=1e-6, is_causal=True, rope_style=RotaryEmbeddingStyle.HALF
    )
    with pytest.raises(ValueError, match="have 10 dimensions, the layer rotates 4"):
        layer(torch.randn(2, 6, 12), None, (torch.ones(2, 6, 10), torch.ones(2, 6, 10)))
