"""Norm and gate against torch's, in fp64, with gradients. How the norm rounds is tested with its layer."""

import pytest
import torch
import torch.nn.functional as F

from d9d.kernel.normalization import rms_norm
from d9d.kernel.swiglu import silu_mul
from tests.d9d.module.block.oracles import FP64


def values(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same_with_gradients(found: torch.Tensor, right: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, **FP64)
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((right * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **FP64)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 0])
def test_rms_norm(zero_centered: bool, num_tokens: int):
    x, weight = values(2, num_tokens, 5, seed=0), values(5, seed=1)
    right = F.rms_norm(x, (5,), weight + 1 if zero_centered else weight, eps=1e-3)
    assert_same_with_gradients(rms_norm(x, weight, 1e-3, zero_centered), right, x, weight)


@pytest.mark.parametrize("num_tokens", [3, 0])
def test_silu_mul(num_tokens: int):
    x, y = values(num_tokens, 5, seed=0), values(num_tokens, 5, seed=1)
    assert_same_with_gradients(silu_mul(x, y), x / (1 + torch.exp(-x)) * y, x, y)
