"""Linear cross entropy against torch's, by all of its arguments."""

import pytest
import torch
import torch.nn.functional as F

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.kernel.cce import IGNORE_INDEX, linear_cross_entropy
from tests.d9d.module.block.oracles import FP64


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    e, c = (torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((2, 5, 4), (7, 4)))
    targets = torch.randint(7, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 4] = IGNORE_INDEX
    return e, c, targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, True, 2])
def test_equals_torch(reduction: str, shift: int):
    e, c, targets = case()
    result = linear_cross_entropy(e, c, targets, reduction=reduction, shift=shift, impl="cce_exact", accum_e_fp32=True)
    places = int(shift)
    logits, labels = e[:, : 5 - places] @ c.T, targets[:, places:]
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    if reduction == "none":
        expected = expected.view(labels.shape)
    torch.testing.assert_close(result, expected, **FP64)
    weights = torch.linspace(1, 2, result.numel(), dtype=torch.float64).view(result.shape)
    for found, right in zip(
        torch.autograd.grad((result * weights).sum(), (e, c)),
        torch.autograd.grad((expected * weights).sum(), (e, c)),
        strict=True,
    ):
        torch.testing.assert_close(found, right, **FP64)


def test_other_labels_to_ignore_and_halves_of_a_backward_pass():
    e, c, targets = case()
    targets = targets.where(targets >= 0, 99)
    expected = F.cross_entropy((e @ c.T).flatten(0, 1), targets.flatten(), ignore_index=99)
    result = linear_cross_entropy(e, c, targets, ignore_index=99)
    torch.testing.assert_close(result, expected, **FP64)
    with GLOBAL_GRAD_CONTEXT.with_directions(GradDirection.inputs):
        result.backward()
    assert c.grad is None
    torch.testing.assert_close(e.grad, torch.autograd.grad(expected, e)[0], **FP64)


def test_what_is_not_supported_is_refused():
    e, c, targets = case()
    for name, value in {"bias": c[:, 0], "softcap": 30.0, "return_lse": True, "vocab_parallel_options": 1}.items():
        with pytest.raises(NotImplementedError, match=f"does not take {name}"):
            linear_cross_entropy(e, c, targets, **{name: value})
    with pytest.raises(ValueError, match="reduction \\('max'\\)"):
        linear_cross_entropy(e, c, targets, reduction="max")
    with pytest.raises(ValueError, match="one label per token"):
        linear_cross_entropy(e, c, targets[0])
    with pytest.raises(ValueError, match=r"shift \(6\)"):
        linear_cross_entropy(e, c, targets, shift=6)
