"""Tells custom autograd functions which half of a split backward pass is running."""

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum


class GradDirection(StrEnum):
    """The two halves of a backward pass."""

    inputs = "inputs"
    """Gradients of activations, which the previous pipeline stage waits for."""
    weight = "weights"
    """Gradients of parameters, which may be computed later."""


class GlobalGradContext:
    """The directions for which gradients are wanted now; outside of `with_directions`, all of them.

    Autograd knows only which tensors require a gradient. A function whose input and weight both do, but which runs in
    the input half of a split backward pass, asks here and leaves out the product that nobody reads.

    The state belongs to the process and not to a thread: autograd runs the backward of device tensors on threads of its
    own, which see neither thread-local nor context variables of the thread that called ``backward``.
    """

    def __init__(self) -> None:
        """Start with all directions wanted."""
        self._wanted = frozenset(GradDirection)

    def check_direction(self, direction: GradDirection | None) -> bool:
        """Tell whether a gradient is to be computed.

        Args:
            direction: What the gradient is for; None for one that is wanted in every direction.
        """
        return direction is None or direction in self._wanted

    @contextmanager
    def with_directions(self, *directions: GradDirection) -> Generator[None]:
        """Want only these directions inside the block, also when blocks are nested; restored when the block raises."""
        outer = self._wanted
        self._wanted = frozenset(directions)
        try:
            yield
        finally:
            self._wanted = outer


GLOBAL_GRAD_CONTEXT = GlobalGradContext()
"""The context that the pipeline stages set and the autograd functions of the package ask."""
