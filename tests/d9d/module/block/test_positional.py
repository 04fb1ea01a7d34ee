"""Rotary embeddings against Python's math and against transformers."""

import math
from typing import Any

import pytest
import torch

from d9d.module.block.positional import (
    LinearRopeScaling,
    Llama3RopeScaling,
    NoRopeScaling,
    NtkRopeScaling,
    RopeScaling,
    RotaryEmbeddingApplicator,
    RotaryEmbeddingProvider,
    RotaryEmbeddingStyle,
    YarnRopeScaling,
)
from tests.d9d.module.block.oracles import FP32, FP64, EverythingInDouble

HALF, INTERLEAVED = RotaryEmbeddingStyle.HALF, RotaryEmbeddingStyle.INTERLEAVED
BASE, HEAD_DIM = 10000, 64

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 2048}

SCALINGS: list[tuple[RopeScaling, dict[str, Any], int | None]] = [
    (LinearRopeScaling(4.0), {"rope_type": "linear", "factor": 4.0}, None),
    # transformers has the dynamic kind only: with factor 1 the stretch is the length over the largest one, here 3.
    (NtkRopeScaling(3.0), {"rope_type": "dynamic", "factor": 1.0}, 3 * 4096),
    (YarnRopeScaling(**YARN), {"rope_type": "yarn", **YARN}, None),
    (YarnRopeScaling(**YARN, truncate=False), {"rope_type": "yarn", "truncate": False, **YARN}, None),
    (
        YarnRopeScaling(**YARN, mscale=0.7, mscale_all_dim=1.0),
        {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.0, **YARN},
        None,
    ),
    # A ramp without length.
    (
        YarnRopeScaling(2.0, 1.0001, 1.0, 2),
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 1.0001,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 2,
        },
        None,
    ),
    (Llama3RopeScaling(**LLAMA3), {"rope_type": "llama3", **LLAMA3}, None),
]


@pytest.mark.parametrize(("scaling", "rope", "length"), SCALINGS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rotated_dim", [HEAD_DIM, 24])
def test_scalings_equal_transformers(
    scaling: RopeScaling, rope: dict[str, Any], length: int | None, dtype: torch.dtype, rotated_dim: int
):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": float(BASE), "partial_rotary_factor": rotated_dim / HEAD_DIM, **rope},
    )
    compute = rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    if dtype == torch.float64:
        with EverythingInDouble():
            expected, mscale = compute(config, None, seq_len=length)
        tolerance = FP64
    else:
        expected, mscale = compute(config, None, seq_len=length)
        tolerance = FP32
    result = scaling.inverse_frequencies(BASE, rotated_dim)
    assert result.dtype == torch.float64
    assert expected.dtype == dtype
    torch.testing.assert_close(result.to(dtype), expected, **tolerance)
    assert scaling.attention_mscale == pytest.approx(mscale, rel=1e-12)


def test_plain_frequencies():
    expected = torch.tensor([BASE ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    torch.testing.assert_close(NoRopeScaling().inverse_frequencies(BASE, 8), expected, **FP64)
    assert NoRopeScaling().attention_mscale == 1.0


@pytest.mark.parametrize("style", list(RotaryEmbeddingStyle))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-10), (torch.bfloat16, 4e-3)]
)
def test_far_positions_are_exact(style: RotaryEmbeddingStyle, dtype: torch.dtype, tolerance: float):
    # In fp32 the angle of position 1,000,003 has an error of up to 0.03, in bf16 of thousands of radians.
    num_positions, head_dim = 1_000_004, 4
    provider = RotaryEmbeddingProvider(BASE, head_dim, num_positions, style).to(dtype)
    positions = [0, 1, 65_537, 1_000_003]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cos, sin = provider(torch.tensor([positions]))
    assert cos.dtype == dtype
    pairs = [0, 1, 0, 1] if style == HALF else [0, 0, 1, 1]
    for table, function in ((cos, math.cos), (sin, math.sin)):
        expected = [[function(p * BASE ** (-2 * pair / head_dim)) for pair in pairs] for p in positions]
        error = (table[0].double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
        assert error <= tolerance


def test_dtypes_do_not_lose_precision_on_the_way():
    direct = RotaryEmbeddingProvider(BASE, 8, 100, HALF).double()
    detour = RotaryEmbeddingProvider(BASE, 8, 100, HALF).bfloat16().double()
    assert torch.equal(direct.cos_table, detour.cos_table)
    assert torch.equal(direct.sin_table, detour.sin_table)


def test_late_init_equals_direct_build():
    with torch.device("meta"):
        late = RotaryEmbeddingProvider(BASE, 8, 100, HALF, YarnRopeScaling(**YARN))
    late.to_empty(device="cpu")
    for buffer in late.buffers():
        buffer.fill_(float("nan"))
    late.reset_parameters()
    direct = RotaryEmbeddingProvider(BASE, 8, 100, HALF, YarnRopeScaling(**YARN))
    assert torch.equal(late.cos_table, direct.cos_table)
    assert torch.equal(late.sin_table, direct.sin_table)
    assert late.state_dict() == {}


def test_mscale_multiplies_the_table():
    plain = RotaryEmbeddingProvider(BASE, 8, 4, HALF).double()
    scaled = RotaryEmbeddingProvider(BASE, 8, 4, HALF, YarnRopeScaling(1e4, 32, 1, 1)).double()
    # Position 0 has cosine 1.
    assert plain(torch.tensor([[0]]))[0].tolist() == [[[1.0] * 8]]
    expected = 0.1 * math.log(1e4) + 1
    torch.testing.assert_close(
        scaled(torch.tensor([[0]]))[0], torch.full((1, 1, 8), expected, dtype=torch.float64), **FP64
    )


def test_unknown_positions_are_refused():
    provider = RotaryEmbeddingProvider(BASE, 8, 10, HALF)
    with pytest.raises(IndexError):
        provider(torch.tensor([[10]]))


def states(num_heads: int, head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_heads, 5, head_dim, generator=generator, dtype=torch.float64)


POSITION_IDS = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 1000, 0, 2]])


@pytest.mark.parametrize("rope_dim", [8, 4])
@pytest.mark.parametrize("style", list(RotaryEmbeddingStyle))
def test_rotation_is_a_product_of_complex_numbers(style: RotaryEmbeddingStyle, rope_dim: int):
    provider = RotaryEmbeddingProvider(BASE, rope_dim, 2000, style).double()
    q, k = states(4, 8, 1), states(2, 8, 2)
    results = RotaryEmbeddingApplicator(style)(q, k, *provider(POSITION_IDS))
    for x, result in zip((q, k), results, strict=True):
        turned = x[..., :rope_dim]
        if style == HALF:
            pairs = torch.complex(turned[..., : rope_dim // 2], turned[..., rope_dim // 2 :])
        else:
            pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        exponents = torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim
        angles = POSITION_IDS[:, None, :, None] * BASE**-exponents
        expected = pairs * torch.polar(torch.ones_like(angles), angles)
        real = (
            torch.cat((expected.real, expected.imag), -1) if style == HALF else torch.view_as_real(expected).flatten(-2)
        )
        torch.testing.assert_close(result, torch.cat((real, x[..., rope_dim:]), -1), **FP64)


def test_half_style_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=8, num_attention_heads=1, max_position_embeddings=2000)
    q, k = states(4, 8, 1), states(2, 8, 2)
    with EverythingInDouble():
        cos, sin = llama.LlamaRotaryEmbedding(config)(q, POSITION_IDS)
    provider = RotaryEmbeddingProvider(config.rope_parameters["rope_theta"], 8, 2000, HALF).double()
    ours = provider(POSITION_IDS)
    torch.testing.assert_close(ours, (cos, sin), **FP64)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(RotaryEmbeddingApplicator(HALF)(q, k, *ours), expected, **FP64)


def test_interleaved_style_equals_transformers_up_to_its_order_of_dimensions():
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    q, k = states(4, 8, 1), states(1, 8, 2)
    half = RotaryEmbeddingProvider(BASE, 8, 2000, HALF).double()(POSITION_IDS)
    interleaved = RotaryEmbeddingProvider(BASE, 8, 2000, INTERLEAVED).double()(POSITION_IDS)
    expected = deepseek.apply_rotary_pos_emb_interleave(q, k, *half)
    result = RotaryEmbeddingApplicator(INTERLEAVED)(q, k, *interleaved)
    # DeepSeek leaves even dimensions first, odd ones after them; products of queries and keys are the same.
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(torch.cat((ours[..., 0::2], ours[..., 1::2]), -1), theirs, **FP64)


def test_low_precision_states_are_rotated_in_the_precision_of_the_table():
    provider = RotaryEmbeddingProvider(BASE, 8, 2000, HALF)
    q, k = states(1, 8, 1).bfloat16(), states(1, 8, 2).bfloat16()
    cos, sin = provider(POSITION_IDS)
    result = RotaryEmbeddingApplicator(HALF)(q, k, cos, sin)
    exact = RotaryEmbeddingApplicator(HALF)(q.float(), k.float(), cos, sin)
    for ours, expected in zip(result, exact, strict=True):
        assert torch.equal(ours, expected.bfloat16())


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"head_dim \(7\) must be positive and even"):
        RotaryEmbeddingProvider(BASE, 7, 10, HALF)
    with pytest.raises(ValueError, match=r"max_position_ids \(0\)"):
        RotaryEmbeddingProvider(BASE, 8, 0, HALF)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        LinearRopeScaling(0)
    with pytest.raises(ValueError, match="more than 2 rotated dimensions"):
        NtkRopeScaling(2.0).inverse_frequencies(BASE, 2)
    with pytest.raises(ValueError, match=r"beta_fast \(1\) must be greater than beta_slow \(32\)"):
        YarnRopeScaling(2.0, 1, 32, 100)
    with pytest.raises(ValueError, match="high_freq_factor"):
        Llama3RopeScaling(2.0, 4.0, 1.0, 100)
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="16 dimensions are to be rotated, but heads have 4"):
        RotaryEmbeddingApplicator(HALF)(q, q, torch.ones(1, 5, 16), torch.ones(1, 5, 16))
