"""Losses of layers against the same losses added to the total, whatever the backward pass starts from."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from d9d.core.side_loss import LOSS_SCALE, announce_loss, attach_side_loss


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ weight)
    return attach_side_loss(hidden, 0.3 * hidden.square().sum())


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), weight.requires_grad_()


def expected(scale: float) -> list[torch.Tensor]:
    x, weight = leaves()
    hidden = torch.tanh(x @ weight)
    total = hidden.sin().sum() + 0.3 * hidden.square().sum()
    return list(torch.autograd.grad(scale * total, (x, weight)))


@pytest.mark.parametrize("scale", [1.0, 0.125, 65536.0, 0.0])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_counts_like_the_loss(scale: float, use_reentrant: bool | None):
    x, weight = leaves()
    hidden = layer(x, weight) if use_reentrant is None else checkpoint(layer, x, weight, use_reentrant=use_reentrant)
    (announce_loss(hidden.sin().sum()) * scale).backward()
    for gradient, right in zip((x.grad, weight.grad), expected(scale), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=0)


def test_values_do_not_change():
    x, weight = leaves()
    assert torch.equal(layer(x, weight), torch.tanh(x @ weight))
    with torch.no_grad():
        assert layer(x, weight).grad_fn is None
    assert not announce_loss(torch.ones(())).requires_grad


def test_a_loss_that_was_not_announced_is_refused():
    x, weight = leaves()
    announce_loss(layer(x, weight).sum()).backward()  # what this pass started from is not that of the next
    with pytest.raises(RuntimeError, match=r"not known. Compute the loss as announce_loss\(loss\)"):
        layer(x, weight).sum().backward()


def test_a_scale_that_is_set():
    x, weight = leaves()
    hidden = layer(x, weight)
    LOSS_SCALE.set(torch.tensor([4.0]))
    try:
        hidden.backward(4.0 * hidden.detach().cos())
    finally:
        LOSS_SCALE.set(None)
    for gradient, right in zip((x.grad, weight.grad), expected(4.0), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=0)
