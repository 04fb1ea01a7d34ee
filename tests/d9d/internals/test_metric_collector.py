"""Periods of a collection and the order of its calls."""

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.metric_collector import AsyncMetricCollector
from d9d.metric.impl.aggregation import SumMetric, WeightedMeanMetric
from d9d.metric.impl.container import ComposeMetric


@pytest.mark.world_size(2)
def test_each_observation_counts_in_one_period():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    metric = ComposeMetric({"mean": WeightedMeanMetric(), "sum": SumMetric()})
    collector = AsyncMetricCollector(metric)
    collector.bind()
    for period in range(2):
        metric.children["mean"].update(torch.tensor(4.0 * period + dist.get_rank()), torch.tensor(1.0))
        metric.children["sum"].update(1.0 + period)
        collector.schedule_collection(context)
        results = collector.collect_results()
        assert results["mean"].item() == 4.0 * period + 0.5
        assert results["sum"].item() == 2.0 * (1 + period)
    collector.unbind()


def test_wrong_orders_are_refused():
    context = DeviceMeshParameters().build()
    collector = AsyncMetricCollector(SumMetric())
    with pytest.raises(RuntimeError, match="not bound"):
        collector.schedule_collection(context)
    collector.bind()
    with pytest.raises(RuntimeError, match="bound already"):
        collector.bind()
    with pytest.raises(RuntimeError, match="no collection was scheduled"):
        collector.collect_results()
    collector.schedule_collection(context)
    with pytest.raises(RuntimeError, match="not fetched"):
        collector.schedule_collection(context)


def test_unbinding_drops_the_collection_and_keeps_the_metric():
    context = DeviceMeshParameters().build()
    metric = SumMetric()
    collector = AsyncMetricCollector(metric)
    collector.bind()
    metric.update(2.0)
    collector.schedule_collection(context)
    collector.unbind()
    collector.bind()
    collector.schedule_collection(context)
    assert collector.collect_results().item() == 2.0
