"""Stochastic rounding inside of a kernel of Triton: on an accelerator, or interpreted (``TRITON_INTERPRET=1``)."""

import math
import os

import pytest
import torch

from d9d.core.device import resolve_device_type

triton = pytest.importorskip("triton")
tl = triton.language
if resolve_device_type() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs an accelerator, or TRITON_INTERPRET=1", allow_module_level=True)

from d9d.kernel.stochastic.ops import fp32_to_bf16_kernel  # noqa: E402  # needs Triton

NUM_DRAWS = 100_000


@triton.jit
def round_all(source, target, size, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < size
    values = tl.load(source + offsets, mask=is_inside)
    tl.store(target + offsets, fp32_to_bf16_kernel(values, offsets, seed), mask=is_inside)


def rounded(source: torch.Tensor, seed: int = 0) -> torch.Tensor:
    source = source.to(resolve_device_type())
    target = torch.empty_like(source, dtype=torch.bfloat16)
    round_all[(triton.cdiv(len(source), 1024),)](source, target, len(source), seed, BLOCK=1024)
    return target.cpu().float()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("part", [0.25, 0.9])
def test_values_between_two_numbers_go_up_as_often_as_they_should(sign: float, part: float):
    gap = 2.0**-7  # between bfloat16 numbers from 1 to 2
    result = rounded(torch.full((NUM_DRAWS,), sign * (1.0 + part * gap)))
    is_up = result == sign * (1.0 + gap)
    assert (is_up | (result == sign)).all()
    five_deviations = 5 * math.sqrt(part * (1 - part) / NUM_DRAWS)
    assert is_up.float().mean().item() == pytest.approx(part, abs=five_deviations)


def test_numbers_of_bfloat16_and_the_ends_of_the_range_stay():
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([0.0, -0.0, 1.0, 2.0**-126, 2.0**-133, largest, -largest, torch.inf, -torch.inf, torch.nan])
    for seed in range(5):
        torch.testing.assert_close(rounded(values, seed), values, rtol=0, atol=0, equal_nan=True)


def test_seeds_decide():
    values = torch.full((100,), 1.0 + 2.0**-8)
    assert torch.equal(rounded(values, 1), rounded(values, 1))
    assert not torch.equal(rounded(values, 1), rounded(values, 2))
