"""Grouped products as one product per group: on every device, in every dtype."""

from collections.abc import Sequence

import torch

from d9d.core.autograd import GradDirection

from .operands import check_counts, matrices_of, with_gradient_in


def multiply(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each group with its matrix. Groups without rows get gradients of zero.

    Shapes:
        ``(S, I)`` and ``(E, I, O)`` to ``(S, O)``.

    Args:
        x: Rows, in the order of groups.
        weight: One matrix per group.
        counts: How many rows each group has.

    Raises:
        ValueError: If there is not one count per matrix, or the counts do not sum to the number of rows.
    """
    check_counts(x, weight, counts)
    # An empty product too: it makes a gradient of zero and not none.
    parts = [rows @ matrix for rows, matrix in zip(x.split(list(counts)), weight.unbind(0), strict=True)]
    return torch.cat(parts)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    a_grad_direction: GradDirection | None,
    b_grad_direction: GradDirection | None,
    trans_b: bool = False,
) -> torch.Tensor:
    """Multiply the rows of each group with its matrix. Blocks the host until the sizes are known.

    Shapes:
        ``(S, I)`` and ``(E, I, O)``, or ``(E, O, I)`` with `trans_b`, to ``(S, O)``.

    Args:
        a: Rows, in the order of groups.
        b: One matrix per group.
        batch_sizes: How many rows each group has, ``(E,)`` integers on any device; zeros are allowed.
        a_grad_direction: What the gradient of `a` is for, by which halves of split backward passes leave it out
            (`d9d.core.autograd.GLOBAL_GRAD_CONTEXT`); None for one that is wanted in every direction.
        b_grad_direction: The same for `b`.
        trans_b: Whether matrices are transposed.

    Raises:
        ValueError: If shapes or sizes do not fit.
    """
    weight = matrices_of(a, b, batch_sizes, trans_b)
    return multiply(
        with_gradient_in(a, a_grad_direction), with_gradient_in(weight, b_grad_direction), batch_sizes.tolist()
    )
