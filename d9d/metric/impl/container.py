"""Several metrics as one."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from d9d.metric.base import Metric
from d9d.metric.component import AccumulatorOwner, MetricAccumulator, sync_accumulators

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext


class ComposeMetric(Metric[dict[str, Any]]):
    """Metrics by name, which are reduced together.

    The accumulators of all children (see `AccumulatorOwner`) share one all-reduce per dtype and operation, however many
    children there are; children of other kinds reduce themselves, in the order of their names.
    """

    # Children compute whatever they like.
    def __init__(self, children: Mapping[str, Metric[Any]]) -> None:
        """Hold metrics.

        Args:
            children: The same names on all ranks.
        """
        self._children = dict(children)

    @property
    def children(self) -> Mapping[str, Metric[Any]]:
        """The metrics by name."""
        return MappingProxyType(self._children)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update all children with the same arguments. Children that take different ones are updated one by one."""
        for child in self._children.values():
            child.update(*args, **kwargs)

    def sync(self, dist_context: "DistributedContext") -> None:
        """Reduce copies of all states over ``dist_context.data_group``. All ranks must call it."""
        packed: list[MetricAccumulator] = []
        for child in self._leaves():
            if isinstance(child, AccumulatorOwner):
                packed.extend(child.accumulators())
            else:
                child.sync(dist_context)
        sync_accumulators(packed, dist_context.data_group)

    def _leaves(self) -> Iterator[Metric[Any]]:
        # By name, not by insertion: ranks may have filled their dicts in different orders.
        for _, child in sorted(self._children.items()):
            if isinstance(child, ComposeMetric):
                yield from child._leaves()
            else:
                yield child

    def compute(self) -> dict[str, Any]:
        """Return what each child computes, by name."""
        return {name: child.compute() for name, child in self._children.items()}

    def reset(self) -> None:
        """Reset all children."""
        for child in self._children.values():
            child.reset()

    def to(self, device: str | torch.device | int) -> None:
        """Move all children to a device."""
        for child in self._children.values():
            child.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each child, by name."""
        return {name: child.state_dict() for name, child in self._children.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each child that has one; a metric that was added since starts anew."""
        for name, child in self._children.items():
            if name in state_dict:
                child.load_state_dict(state_dict[name])
