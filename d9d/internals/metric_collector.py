"""Reduces and computes a metric beside the training step."""

from typing import Any

import torch

from d9d.core.device import side_stream
from d9d.core.dist_context import DistributedContext
from d9d.core.pytree import tree_leaves
from d9d.core.types import PyTree
from d9d.metric import Metric


class AsyncMetricCollector:
    """Collects the value of a metric over all ranks without blocking the host.

    A collection has two halves: `schedule_collection` after the last update of a period, and `collect_results` before
    the first update of the next one. What is queued in between, such as the optimizer step, runs beside it.

    [Note: who touches the metric's state]
    The side stream starts after the updates queued so far, and reads the state; `reset` and the next updates are queued
    on the main stream after `collect_results`, which makes the main stream wait for the side stream. So no update may
    come between the two halves, and each observation counts in exactly one period. On CPU there are no streams:
    `schedule_collection` does all the work before it returns.
    """

    def __init__(self, metric: Metric[Any]) -> None:
        """Collect a metric, whose results are a tree of tensors.

        Args:
            metric: On the device of this rank.
        """
        self._metric = metric
        self._is_bound = False
        self._stream: torch.Stream | None = None
        self._is_scheduled = False
        self._results: PyTree[torch.Tensor] = None

    def bind(self) -> None:
        """Start to take collections.

        Raises:
            RuntimeError: If it has started already.
        """
        if self._is_bound:
            raise RuntimeError("the metric collector is bound already; unbind it first.")
        self._is_bound = True

    def unbind(self) -> None:
        """Stop, and drop a collection that was not fetched. The metric keeps its state. May be called at any time."""
        self._wait_for_stream()
        self._is_bound = False
        self._is_scheduled = False
        self._results = None

    def schedule_collection(self, dist_context: DistributedContext) -> None:
        """Start to reduce and compute the metric. All ranks must call it. Does not block the host on an accelerator.

        The metric must not be updated before `collect_results`.

        Args:
            dist_context: The ranks; the metric is reduced over its data group.

        Raises:
            RuntimeError: If the collector is not bound, or an earlier collection was not fetched.
        """
        if not self._is_bound:
            raise RuntimeError("the metric collector is not bound; call bind() before schedule_collection().")
        if self._is_scheduled:
            raise RuntimeError("an earlier collection was not fetched; call collect_results() first.")
        with side_stream(dist_context.current_device) as stream:
            self._metric.sync(dist_context)
            self._results = self._metric.compute()
        self._stream = stream
        self._is_scheduled = True

    def collect_results(self) -> PyTree[torch.Tensor]:
        """Return the results and reset the metric, so that the next period starts anew.

        Does not block the host: reading a value does.

        Returns:
            What the metric computes, on the device of this rank.

        Raises:
            RuntimeError: If no collection was scheduled.
        """
        if not self._is_scheduled:
            raise RuntimeError("no collection was scheduled; call schedule_collection() first.")
        results, self._results = self._results, None
        self._is_scheduled = False
        self._wait_for_stream(results)
        self._metric.reset()
        return results

    def _wait_for_stream(self, results: PyTree[torch.Tensor] = None) -> None:
        """Make the current stream wait for the collection, and keep the memory of the results until it has read them."""
        if self._stream is None:
            return
        current = torch.accelerator.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                leaf.record_stream(current)
        self._stream = None
