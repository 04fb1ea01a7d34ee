"""Grouped products by the package nv-grouped-gemm: bfloat16 only; the host waits for the sizes of the groups."""

from collections.abc import Callable

import torch

from d9d.core.autograd import GradDirection
from d9d.kernel.optional import import_kernel

from . import eager
from .operands import matrices_of, with_gradient_in, with_plain_strides


def load_kernel() -> Callable[..., torch.Tensor]:
    """Return ``grouped_gemm.ops.gmm``.

    Raises:
        ImportError: If the package is not installed.
    """
    return import_kernel("the grouped product kind grouped_gemm", "grouped_gemm", "nv-grouped-gemm", "torch").ops.gmm


def multiply(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    host_counts: torch.Tensor,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Multiply the rows of each group with its matrix.

    Shapes:
        ``(S, I)`` and ``(E, I, O)``, or ``(E, O, I)`` if transposed, to ``(S, O)``.

    Args:
        kernel: What `load_kernel` returned.
        x: Rows, in the order of groups.
        weight: One matrix per group.
        host_counts: How many rows each group has, ``(E,)``, on the CPU.
        is_transposed: Whether matrices are transposed.
    """
    if x.shape[0] == 0:
        return eager.multiply(x, weight.mT if is_transposed else weight, host_counts.tolist())
    # The kernel refuses other strides.
    return kernel(with_plain_strides(x), weight.contiguous(), host_counts.to(torch.int64), trans_b=is_transposed)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    a_grad_direction: GradDirection | None,
    b_grad_direction: GradDirection | None,
    trans_b: bool = False,
) -> torch.Tensor:
    """Multiply the rows of each group with its matrix: by the kernel, or on the CPU one by one.

    Blocks the host until the sizes are known.

    Arguments, shapes and further errors are those of `d9d.kernel.grouped_mm.eager.grouped_mm`.

    Raises:
        ImportError: If the package is not installed, but on the CPU.
    """
    if a.device.type == "cpu":
        return eager.grouped_mm(a, b, batch_sizes, a_grad_direction, b_grad_direction, trans_b)
    matrices_of(a, b, batch_sizes, trans_b)
    return multiply(
        load_kernel(),
        with_gradient_in(a, a_grad_direction),
        with_gradient_in(b, b_grad_direction),
        batch_sizes.cpu(),
        trans_b,
    )
