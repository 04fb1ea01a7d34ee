"""Grouped products by the package quack-kernels: 16-bit dtypes only."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.kernel.optional import import_kernel

from . import eager
from .operands import matrices_of, with_plain_strides


def load_kernel() -> Callable[..., torch.Tensor]:
    """Return ``quack.gemm_interface.gemm``.

    Raises:
        ImportError: If the package is not installed.
    """
    return import_kernel("the grouped product kind quack", "quack.gemm_interface", "quack-kernels", "torch").gemm


def multiply(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    x_grad_direction: GradDirection | None = GradDirection.inputs,
    weight_grad_direction: GradDirection | None = GradDirection.weight,
) -> torch.Tensor:
    """Multiply the rows of each group with its matrix.

    Shapes:
        ``(S, I)`` and ``(E, I, O)`` to ``(S, O)``.

    Args:
        kernel: What `load_kernel` returned.
        x: Rows, in the order of groups.
        weight: One matrix per group.
        ends: Where each group ends (exclusive), ``(E,)``, int32, on the device of the rows.
        x_grad_direction: What the gradient of the rows is for; None for one that is wanted in every direction.
        weight_grad_direction: The same for the matrices.
    """
    if x.shape[0] == 0:
        return eager.multiply(x, weight, [0] * weight.shape[0])
    bounds = F.pad(ends, (1, 0))  # (E + 1,), int32
    product = _Product.apply(with_plain_strides(x), weight, bounds, kernel, x_grad_direction, weight_grad_direction)
    # Autograd functions are untyped.
    return cast(torch.Tensor, product)


class _Product(torch.autograd.Function):
    """The package's own gradients are those of whole layers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # takes what is put on it
        x: torch.Tensor,
        weight: torch.Tensor,
        bounds: torch.Tensor,
        kernel: Callable[..., torch.Tensor],
        *grad_directions: GradDirection | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bounds)
        ctx.kernel = kernel
        ctx.grad_directions = grad_directions
        return kernel(x, weight, cu_seqlens_m=bounds)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bounds = ctx.saved_tensors
        grad = with_plain_strides(grad)
        wants_x, wants_weight = (
            is_needed and GLOBAL_GRAD_CONTEXT.check_direction(direction)
            for is_needed, direction in zip(ctx.needs_input_grad[:2], ctx.grad_directions, strict=True)
        )
        return (
            ctx.kernel(grad, weight.mT, cu_seqlens_m=bounds) if wants_x else None,
            ctx.kernel(x.T, grad, cu_seqlens_k=bounds) if wants_weight else None,
            *[None] * 4,
        )


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    a_grad_direction: GradDirection | None,
    b_grad_direction: GradDirection | None,
    trans_b: bool = False,
) -> torch.Tensor:
    """Multiply the rows of each group with its matrix: by the kernel, or on the CPU one by one.

    Arguments, shapes and further errors are those of `d9d.kernel.grouped_mm.eager.grouped_mm`.

    Raises:
        ImportError: If the package is not installed, but on the CPU.
    """
    if a.device.type == "cpu":
        return eager.grouped_mm(a, b, batch_sizes, a_grad_direction, b_grad_direction, trans_b)
    weight = matrices_of(a, b, batch_sizes, trans_b)
    ends = batch_sizes.to(a.device).cumsum(0, dtype=torch.int32)
    return multiply(load_kernel(), a, weight, ends, a_grad_direction, b_grad_direction)
