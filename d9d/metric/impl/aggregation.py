"""Sums and means."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from d9d.metric.base import Metric
from d9d.metric.component import MetricAccumulator, sync_accumulators

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext


class SumMetric(Metric[torch.Tensor]):
    """The sum of all values, exact for whole numbers up to 2**53."""

    def __init__(self) -> None:
        """Start at 0."""
        self._sum = MetricAccumulator(torch.zeros((), dtype=torch.float64))

    def accumulators(self) -> Sequence[MetricAccumulator]:
        """Return what `sync` reduces."""
        return (self._sum,)

    def update(self, value: torch.Tensor | float) -> None:
        """Add a value, or all elements of a tensor."""
        self._sum.update(torch.as_tensor(value).detach().to(self._sum.local_value).sum())

    def sync(self, dist_context: "DistributedContext") -> None:
        """Sum a copy over ``dist_context.data_group``. All ranks must call it."""
        sync_accumulators(self.accumulators(), dist_context.data_group)

    def compute(self) -> torch.Tensor:
        """Return the sum, 0 if there were no values. Shapes: ()."""
        return self._sum.value

    def reset(self) -> None:
        """Go back to 0."""
        self._sum.reset()

    def to(self, device: str | torch.device | int) -> None:
        """Move the sum to a device."""
        self._sum.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the sum of this rank."""
        return {"sum": self._sum.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a sum of this rank."""
        self._sum.load_state_dict(state_dict["sum"])


class WeightedMeanMetric(Metric[torch.Tensor]):
    """``sum(weight * value) / sum(weight)``, over all observations of all ranks.

    An observation of weight 0 does not count, whatever its value: the NaN of a masked token does no harm.
    """

    def __init__(self, *, nan_policy: Literal["propagate", "ignore"] = "propagate", no_data: float = math.nan) -> None:
        """Start without observations.

        Args:
            nan_policy: Whether a NaN value of a weight other than 0 makes the mean NaN, which shows it, or is left out
                together with its weight.
            no_data: What `compute` returns when the total weight is 0. NaN, the default, can not be mistaken for a
                measurement and loses every comparison by `d9d.metric.is_better`; a number would win one of min and max.
        """
        self._nan_policy: Literal["propagate", "ignore"] = nan_policy
        self._no_data = no_data
        self._weighted_sum = MetricAccumulator(torch.zeros((), dtype=torch.float64))
        self._weight = MetricAccumulator(torch.zeros((), dtype=torch.float64))

    def accumulators(self) -> Sequence[MetricAccumulator]:
        """Return what `sync` reduces."""
        return (self._weighted_sum, self._weight)

    def update(self, values: torch.Tensor | float, weights: torch.Tensor | float) -> None:
        """Add observations.

        Args:
            values: Of any shape.
            weights: Of a shape that broadcasts with that of the values.
        """
        observed = torch.as_tensor(values).detach().to(self._weighted_sum.local_value)
        counted = torch.as_tensor(weights).detach().to(self._weight.local_value)
        observed, counted = torch.broadcast_tensors(observed, counted)
        if self._nan_policy == "ignore":
            counted = counted.where(~observed.isnan(), 0.0)
        # A product with weight 0 would still be NaN for values that are NaN or infinite.
        self._weighted_sum.update((observed * counted).where(counted != 0, 0.0).sum())
        self._weight.update(counted.sum())

    def sync(self, dist_context: "DistributedContext") -> None:
        """Sum copies over ``dist_context.data_group``, in one collective. All ranks must call it."""
        sync_accumulators(self.accumulators(), dist_context.data_group)

    def compute(self) -> torch.Tensor:
        """Return the mean, or ``no_data`` if the total weight is 0. Shapes: ()."""
        weight = self._weight.value
        return (self._weighted_sum.value / weight).where(weight != 0, self._no_data)

    def reset(self) -> None:
        """Forget all observations."""
        self._weighted_sum.reset()
        self._weight.reset()

    def to(self, device: str | torch.device | int) -> None:
        """Move the sums to a device."""
        self._weighted_sum.to(device)
        self._weight.to(device)

    @property
    def accumulated_weight(self) -> torch.Tensor:
        """The total weight, of all ranks as of `sync`, or of this rank if it has been updated since. Shapes: ()."""
        return self._weight.value

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank."""
        return {"weighted_sum": self._weighted_sum.state_dict(), "weight": self._weight.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from sums of this rank."""
        self._weighted_sum.load_state_dict(state_dict["weighted_sum"])
        self._weight.load_state_dict(state_dict["weight"])
