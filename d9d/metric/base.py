"""The contract of a metric."""

import abc
import math
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext

TComputeResult = TypeVar("TComputeResult", covariant=True)


class Metric(abc.ABC, Stateful, Generic[TComputeResult]):
    """A quantity that is accumulated on each rank and reduced over the ranks when it is wanted.

    Every rank updates its own running state. `sync` reduces a copy of it, so that running states never hold what other
    ranks have seen, and `sync` may be called any number of times. `compute` then returns the value over all ranks,
    until the next `update`; without `sync`, the value of this rank.

    A mean over nothing is NaN: the only number that can not be mistaken for a measurement. Whoever compares values
    calls `is_better`, by which NaN never wins.
    """

    @abc.abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add an observation of this rank. Runs no collectives and does not block the host."""

    @abc.abstractmethod
    def sync(self, dist_context: "DistributedContext") -> None:
        """Reduce a copy of the running state over ``dist_context.data_group``. All ranks must call it.

        Tensor-parallel peers, which see the same data, are not counted twice. On one rank it is a local copy.
        """

    @abc.abstractmethod
    def compute(self) -> TComputeResult:
        """Return the value of all ranks as of `sync`, or of this rank if it has been updated since."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all observations."""

    def to(self, device: str | torch.device | int) -> None:
        """Move the state to a device. Metrics that hold tensors override it."""


def is_better(candidate: float, best: float | None, mode: Literal["min", "max"]) -> bool:
    """Tell whether a value is to replace the best one so far; NaN never does, and is replaced by any number.

    Args:
        candidate: New value.
        best: Best value so far; None if there is none.
        mode: Whether less or more is better.
    """
    if math.isnan(candidate):
        return False
    if best is None or math.isnan(best):
        return True
    return candidate < best if mode == "min" else candidate > best
