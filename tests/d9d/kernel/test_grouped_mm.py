"""Grouped products by the names of the kernels, against one product of plain torch per row, in fp64."""

import importlib.util
from collections.abc import Callable

import pytest
import torch

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.kernel.grouped_mm import eager, nv, quack
from d9d.kernel.grouped_mm import torch as by_torch
from tests.d9d.module.block.oracles import FP32_SUMS, FP64

IN, OUT = 8, 12
NAMES = [by_torch.grouped_mm, nv.grouped_mm, quack.grouped_mm, eager.grouped_mm]
BOTH = (GradDirection.inputs, GradDirection.weight)


def operands(counts: list[int], trans_b: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(counts), OUT, IN) if trans_b else (len(counts), IN, OUT)
    a = torch.randn(sum(counts), IN, generator=generator, dtype=torch.float64)
    b = torch.randn(shape, generator=generator, dtype=torch.float64)
    return a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_one_product_per_row(name: Callable[..., torch.Tensor], trans_b, counts, dtype):
    a, b = operands(counts, trans_b, dtype)
    wide_a, wide_b = (tensor.detach().double().requires_grad_() for tensor in (a, b))
    group_of_row = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    expected = torch.einsum("si,soi->so" if trans_b else "si,sio->so", wide_a, wide_b[group_of_row])
    result = name(a, b, torch.tensor(counts), *BOTH, trans_b=trans_b)
    assert result.dtype == dtype
    tolerance = FP64 if dtype == torch.float64 else FP32_SUMS
    torch.testing.assert_close(result.double(), expected, **tolerance)
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    gradients = torch.autograd.grad((result * weights.to(dtype)).sum(), (a, b))
    right = torch.autograd.grad((expected * weights).sum(), (wide_a, wide_b))
    for gradient, of_rows in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient.double(), of_rows, **tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_halves_of_a_backward_pass_leave_out_what_they_do_not_want(name: Callable[..., torch.Tensor], dtype):
    for directions, half, has_gradients in [
        (BOTH, GradDirection.inputs, (True, False)),
        (BOTH, GradDirection.weight, (False, True)),
        ((GradDirection.weight, None), GradDirection.inputs, (False, True)),
        ((None, None), GradDirection.inputs, (True, True)),
    ]:
        a, b = operands([2, 1], False, dtype)
        result = name(a, b, torch.tensor([2, 1]), *directions)
        with GLOBAL_GRAD_CONTEXT.with_directions(half):
            result.sum().backward()
        assert (a.grad is not None, b.grad is not None) == has_gradients
        if a.grad is not None:  # the gradient of a sum: rows of sums over outputs
            torch.testing.assert_close(a.grad, b.detach()[torch.tensor([0, 0, 1])].sum(2), **FP32_SUMS)
        if b.grad is not None:  # for each output: sums over the rows of the group
            of_groups = torch.stack([a.detach()[:2].sum(0), a.detach()[2]])
            torch.testing.assert_close(b.grad, of_groups.unsqueeze(2).expand_as(b), **FP32_SUMS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "view",
    [
        lambda wide: wide[:, :, ::2],
        lambda wide: wide[:, :, 1 : 1 + OUT],
        lambda wide: wide.permute(1, 2, 0).contiguous().permute(2, 0, 1)[:, :, :OUT],
        lambda wide: wide[:, :1, :OUT].expand(2, IN, OUT),
    ],
)
def test_matrices_may_have_any_strides(view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype):
    a, _ = operands([2, 1], False, dtype)
    wide = torch.randn(2, IN, 2 * OUT, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()
    found = by_torch.grouped_mm(a, view(wide), torch.tensor([2, 1]), *BOTH)
    right = torch.cat([a[:2] @ view(wide)[0], a[2:] @ view(wide)[1]])
    torch.testing.assert_close(found, right, **FP32_SUMS)
    weights = torch.linspace(-1, 1, found.numel(), dtype=dtype).view_as(found)
    for gradient, of_rows in zip(
        *(torch.autograd.grad((each * weights).sum(), (a, wide)) for each in (found, right)), strict=True
    ):
        torch.testing.assert_close(gradient, of_rows, **FP32_SUMS)


def test_what_does_not_fit_is_refused():
    a, b = operands([2, 1], False, torch.float32)
    for name in NAMES:
        with pytest.raises(ValueError, match=r"2 matrices and 3 rows, but groups of \[2, 2\]"):
            name(a, b, torch.tensor([2, 2]), *BOTH)
        with pytest.raises(ValueError, match=r"\(E, O, I\) and E sizes, but got \(3, 8\), \(2, 8, 12\) and \(2,\)"):
            name(a, b, torch.tensor([2, 1]), *BOTH, trans_b=True)
        with pytest.raises(ValueError, match=r"and \(3,\)"):
            name(a, b, torch.tensor([2, 1, 0]), *BOTH)


@pytest.mark.parametrize(("module", "package"), [(nv, "nv-grouped-gemm"), (quack, "quack-kernels")])
def test_packages_are_needed_off_the_cpu_only(module, package: str):
    if importlib.util.find_spec({nv: "grouped_gemm", quack: "quack"}[module]) is not None:
        pytest.skip(f"{package} is installed")
    a, b = (tensor.to("meta") for tensor in operands([2, 1], False, torch.bfloat16))
    with pytest.raises(ImportError, match=f'"pip install {package}"'):
        module.grouped_mm(a, b, torch.tensor([2, 1]), *BOTH)
