"""Stochastic rounding: which neighbours, how often, and at the ends of the range."""

import math

import pytest
import torch

from d9d.kernel.stochastic import adamw_stochastic_bf16_, copy_fp32_to_bf16_stochastic_

NUM_DRAWS = 100_000


def rounded(source: torch.Tensor, seed: int = 0) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=torch.bfloat16)
    assert copy_fp32_to_bf16_stochastic_(target, source, torch.Generator().manual_seed(seed)) is target
    return target


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.9])
def test_values_between_two_numbers_go_up_as_often_as_they_should(sign: float, part: float):
    gap = 2.0**-7  # between bfloat16 numbers from 1 to 2
    result = rounded(torch.full((NUM_DRAWS,), sign * (1.0 + part * gap))).float()
    is_up = result == sign * (1.0 + gap)
    assert (is_up | (result == sign)).all()
    five_deviations = 5 * math.sqrt(part * (1 - part) / NUM_DRAWS)
    assert is_up.float().mean().item() == pytest.approx(part, abs=five_deviations)


def test_numbers_of_bfloat16_and_the_ends_of_the_range_stay():
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor(
        [0.0, -0.0, 1.0, -3.5, 2.0**-126, 2.0**-133, largest, -largest, torch.inf, -torch.inf, torch.nan]
    )
    for seed in range(20):
        torch.testing.assert_close(rounded(values, seed).float(), values, rtol=0, atol=0, equal_nan=True)
    beyond = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    torch.testing.assert_close(rounded(beyond), beyond.bfloat16(), rtol=0, atol=0)


def test_other_dtypes_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        copy_fp32_to_bf16_stochastic_(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(3,\) into torch.bfloat16 \(2,\)"):
        copy_fp32_to_bf16_stochastic_(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_adamw_but_for_rounding(state_dtype: torch.dtype):
    """Each step starts where the last one has left everything; torch takes it in fp32."""
    generator = torch.Generator().manual_seed(3)
    params = torch.randn(64, generator=generator).bfloat16()
    exp_avg, exp_avg_sq = (torch.zeros(64, dtype=state_dtype) for _ in range(2))
    for step in range(1, 4):
        grads = torch.randn(64, generator=generator).bfloat16()
        whole = torch.nn.Parameter(params.float())
        whole.grad = grads.float()
        reference = torch.optim.AdamW([whole], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False)
        reference.state[whole] = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": exp_avg.float().clone(),
            "exp_avg_sq": exp_avg_sq.float().clone(),
        }
        reference.step()
        adamw_stochastic_bf16_(params, grads, exp_avg, exp_avg_sq, 0.01, 0.8, 0.9, 1e-6, 0.1, step, generator)
        moments = reference.state[whole]
        found = ((params, whole.detach()), (exp_avg, moments["exp_avg"]), (exp_avg_sq, moments["exp_avg_sq"]))
        for stored, expected in found:
            # One of both neighbours, which are 2**-7 apart at most.
            tolerance = 2.0**-7 if stored.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(stored.float(), expected, rtol=tolerance, atol=1e-7)


def test_small_updates_are_kept_on_average():
    """A thousand steps of 2**-14 each, which rounding to the nearest would all lose."""
    params = torch.ones(4096, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(4096)
    for _ in range(1000):
        # Weight decay alone: the factor is 1 - 2**-14.
        adamw_stochastic_bf16_(params, zeros, zeros.clone(), zeros.clone(), 1.0, 0.9, 0.9, 1e-8, 2.0**-14, 1, generator)
    assert params.float().mean().item() == pytest.approx((1 - 2.0**-14) ** 1000, abs=2e-3)
