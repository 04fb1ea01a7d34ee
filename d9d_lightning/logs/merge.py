"""Merges the values that one key of `self.log` has in the microbatches of a pack. Everything stays on the device."""
# Lightning keeps the rules of self.log to itself
# pyright: reportPrivateUsage=false

import math
from typing import Any, SupportsFloat, TypeAlias, cast

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype
from lightning.pytorch.utilities.data import _extract_batch_size, extract_batch_size
from torchmetrics import Metric

Scalar: TypeAlias = torch.Tensor | float
"""A value that `self.log` takes: a tensor of one element, or a number."""


class SampleCount:
    """The number of samples of one microbatch, looked for when a mean first needs it."""

    def __init__(self, batch: object) -> None:
        """Look at nothing yet.

        Args:
            batch: The microbatch; None stands for one sample.
        """
        self._batch: Any = batch
        self._counted: int | None = None
        self._guessed: int | None = None

    def counted(self) -> int:
        """Return the number as Lightning finds it, with its warning where tensors disagree.

        Raises:
            MisconfigurationException: If there is no tensor.
        """
        if self._counted is None:
            self._counted = 1 if self._batch is None else extract_batch_size(self._batch)
        return self._counted

    def guessed(self) -> int:
        """Return the number, or 1, for where Lightning does not ask and so would not complain."""
        if self._guessed is None:
            try:
                sizes = (size for size in _extract_batch_size(self._batch) if size is not None)
                self._guessed = next(sizes, 1)
            except RecursionError:
                self._guessed = 1
        return self._guessed


class KeyMerge:
    """The values of one key so far, and their sample counts.

    A single value is kept as it is, so that a pack of one microbatch logs what Lightning alone would. Of several, the
    dtype is Lightning's: that of the values, but at least float32, and never an integer for a mean. Of a metric, which
    sums for itself, there is the object.
    """

    def __init__(self, *, reduction: str, counts_samples: bool) -> None:
        """Begin without values.

        Args:
            reduction: "mean", "sum", "min" or "max".
            counts_samples: Whether Lightning weighs the values by their numbers of samples.
        """
        self._reduction = reduction
        self._counts_samples = counts_samples
        self._num_values = 0
        self._value: Scalar | Metric = 0.0
        self._weighted: Scalar = 0.0
        self._size: Scalar | None = None
        self._passes_size = counts_samples

    def add(self, value: Scalar | Metric, batch_size: Scalar | None, samples: SampleCount) -> None:
        """Add a value.

        Args:
            value: A scalar, or a metric where all values are one.
            batch_size: Number of samples, as given by the user.
            samples: The samples of the microbatch, for where it is needed but not given.
        """
        self._num_values += 1
        self._passes_size |= batch_size is not None
        if isinstance(value, Metric):
            self._value, self._size = value, batch_size
            return
        value = _detached(value) if isinstance(value, torch.Tensor) else _plain(value)
        if self._reduction == "mean":
            self._add_to_mean(value, self._weight(batch_size, samples))
            return
        self._size = batch_size
        if self._num_values == 1:
            self._value = _snapshot(value)
        elif self._reduction == "sum":
            self._value = _plus(_exact(cast("Scalar", self._value)), value, 1)
        else:
            self._value = _extreme(self._reduction, cast("Scalar", self._value), value)

    def value(self) -> Scalar | Metric:
        """Return the merged value."""
        value = self._value
        if isinstance(value, Metric) or self._num_values < 2 or self._reduction != "mean":
            return value
        return _quotient(self._weighted, cast("Scalar", self._size), value)

    def batch_size(self) -> Scalar | None:
        """Return what Lightning has to weigh the merged value by, or None if it need not."""
        return self._size if self._passes_size else None

    def _weight(self, batch_size: Scalar | None, samples: SampleCount) -> Scalar:
        if isinstance(batch_size, torch.Tensor):
            return batch_size.detach()
        if batch_size is not None:
            return batch_size
        return samples.counted() if self._counts_samples else samples.guessed()

    def _add_to_mean(self, value: Scalar, weight: Scalar) -> None:
        if self._num_values == 1:
            self._value, self._size = _snapshot(value), weight
            return
        size = cast("Scalar", self._size)
        if self._num_values == 2:
            self._weighted = _floating(cast("Scalar", self._value)) * size
        self._weighted = _plus(self._weighted, value, weight)
        self._size = size + weight
        self._value = value


def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(()) if value.ndim else value.detach()


def _plain(value: object) -> float:
    # Lightning takes any number, also numpy's.
    return value if isinstance(value, (float, int)) else float(cast("SupportsFloat", value))


def _snapshot(value: Scalar) -> Scalar:
    # The user may go on to change the tensor.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _floating(value: Scalar) -> Scalar:
    """Widen a tensor to what Lightning accumulates in."""
    if not isinstance(value, torch.Tensor) or value.dtype in (torch.float32, torch.float64):
        return value
    return value.to(_get_default_dtype())


def _exact(value: Scalar) -> Scalar:
    """Widen a tensor to something that sums do not overflow. True + True is 2."""
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return value.to(torch.int64)
    return _floating(value)


def _plus(total: Scalar, value: Scalar, weight: Scalar) -> Scalar:
    """Return total + value * weight, by one kernel where it can."""
    if not isinstance(value, torch.Tensor) or isinstance(weight, torch.Tensor) or not isinstance(total, torch.Tensor):
        return total + value * weight
    if not total.is_floating_point():
        return total + _exact(value) * weight
    return torch.add(total, value, alpha=weight)


def _quotient(weighted: Scalar, size: Scalar, last: Scalar) -> Scalar:
    """Divide; where nothing has any weight there is no mean, and the last value is shown, as by Lightning."""
    if not isinstance(size, torch.Tensor):
        return weighted / size if size else last
    last = torch.as_tensor(last, dtype=_get_default_dtype(), device=size.device)
    return torch.where(size == 0, last, weighted / size)


def _extreme(reduction: str, first: Scalar, second: Scalar) -> Scalar:
    """Return the greater or the smaller one, or the one that is not a number."""
    if not isinstance(first, torch.Tensor) and not isinstance(second, torch.Tensor):
        if math.isnan(first) or math.isnan(second):
            return math.nan
        return max(first, second) if reduction == "max" else min(first, second)
    device = first.device if isinstance(first, torch.Tensor) else cast("torch.Tensor", second).device
    first, second = (
        side if isinstance(side, torch.Tensor) else torch.tensor(side, dtype=_get_default_dtype(), device=device)
        for side in (first, second)
    )
    return torch.maximum(first, second) if reduction == "max" else torch.minimum(first, second)
