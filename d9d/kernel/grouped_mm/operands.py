"""What goes into grouped products: shapes, strides, and which gradients are wanted."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection


def check_counts(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> None:
    """Refuse groups that do not fit the rows and matrices.

    Raises:
        ValueError: If there is not one count per matrix, or the counts do not sum to the number of rows.
    """
    if len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise ValueError(
            f"there are {weight.shape[0]} matrices and {x.shape[0]} rows, but groups of {list(counts)} "
            f"({len(counts)} groups, {sum(counts)} rows). Pass one count per matrix."
        )


def matrices_of(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """Return ``b`` as ``(E, I, O)``, once it is known to fit the rows ``(S, I)`` and the sizes of groups ``(E,)``.

    Sizes that are on a device are not read: the host would wait for it.

    Raises:
        ValueError: If shapes or sizes do not fit.
    """
    weight = b.mT if trans_b and b.ndim == 3 else b
    if a.ndim != 2 or b.ndim != 3 or batch_sizes.shape != b.shape[:1] or a.shape[1] != weight.shape[1]:
        layout = "(E, O, I)" if trans_b else "(E, I, O)"
        raise ValueError(
            f"a grouped product takes rows (S, I), matrices {layout} and E sizes, but got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and {tuple(batch_sizes.shape)} (trans_b={trans_b})."
        )
    if batch_sizes.device.type == "cpu":
        check_counts(a, weight, batch_sizes.tolist())
    return weight


def with_plain_strides(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows if needed. `contiguous` is not enough: to it, an empty tensor is contiguous whatever its strides."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def with_gradient_in(tensor: torch.Tensor, direction: GradDirection | None) -> torch.Tensor:
    """Return the tensor, whose gradient is left out in halves of a split backward pass that do not want it.

    Args:
        tensor: Operand of a product that autograd knows.
        direction: What its gradient is for; None for one that is wanted in every direction.
    """
    if direction is None or not tensor.requires_grad:
        return tensor
    # Autograd functions are untyped.
    return cast(torch.Tensor, _GradientInDirection.apply(tensor, direction))


class _GradientInDirection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, direction: GradDirection) -> torch.Tensor:  # noqa: ANN401  # autograd's
        ctx.direction = direction
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grad if GLOBAL_GRAD_CONTEXT.check_direction(ctx.direction) else None), None
