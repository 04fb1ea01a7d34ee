"""Grouped products by `torch.nn.functional.grouped_mm`: one kernel, of which the host does not know the sizes."""

from typing import Any, Final, cast

import torch
import torch.nn.functional as F

from d9d.core.autograd import GradDirection

from . import eager
from .operands import matrices_of, with_gradient_in, with_plain_strides

_ALIGNMENT_BYTES: Final = 16
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def refusal(dtype: torch.dtype, in_features: int, out_features: int) -> str | None:
    """Return why the kernel can not compute in a dtype, or at these sizes; None if it can."""
    if dtype not in _DTYPES:
        return f"torch's grouped matrix product computes in {[str(d) for d in _DTYPES]}, not in {dtype}."
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    if in_features % multiple or out_features % multiple:
        return (
            f"torch's grouped matrix product wants sizes of a multiple of {multiple} in {dtype}, got "
            f"in_features {in_features} and out_features {out_features}."
        )
    return None


def multiply(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group with its matrix, where there is no `refusal`.

    Shapes:
        ``(S, I)`` and ``(E, I, O)`` to ``(S, O)``.

    Args:
        x: Rows, in the order of groups.
        weight: One matrix per group.
        ends: Where each group ends (exclusive), ``(E,)``, int32, on the device of the rows.
    """
    product = F.grouped_mm(with_plain_strides(x), _with_strides_of_rows_or_columns(weight), offs=ends)
    # Autograd functions are untyped.
    return cast(torch.Tensor, _ContiguousGradient.apply(product))


def _with_strides_of_rows_or_columns(weight: torch.Tensor) -> torch.Tensor:
    """Copy matrices if needed: the kernel takes them by rows or by columns, which are whole, apart, and aligned."""
    multiple = _ALIGNMENT_BYTES // weight.dtype.itemsize
    _, row, column = weight.stride()
    _, num_rows, num_columns = weight.shape
    by_rows = column == 1 and row >= num_columns and row % multiple == 0
    by_columns = row == 1 and column >= num_rows and column % multiple == 0
    return weight if by_rows or by_columns else weight.contiguous()


class _ContiguousGradient(torch.autograd.Function):
    """Identity. The kernel's backward pass refuses expanded gradients, such as those of a sum (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # autograd's signature
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return with_plain_strides(grad)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    a_grad_direction: GradDirection | None,
    b_grad_direction: GradDirection | None,
    trans_b: bool = False,
) -> torch.Tensor:
    """Multiply the rows of each group with its matrix: by the kernel, or where it can not compute, one by one.

    The second blocks the host until the sizes are known.

    Arguments, shapes and errors are those of `d9d.kernel.grouped_mm.eager.grouped_mm`.
    """
    weight = matrices_of(a, b, batch_sizes, trans_b)
    if a.dtype != b.dtype or refusal(a.dtype, *weight.shape[1:]) is not None:
        return eager.grouped_mm(a, b, batch_sizes, a_grad_direction, b_grad_direction, trans_b)
    ends = batch_sizes.to(a.device).cumsum(0, dtype=torch.int32)
    return multiply(with_gradient_in(a, a_grad_direction), with_gradient_in(weight, b_grad_direction), ends)
