"""Parts that metrics are made of."""

from d9d.metric.component.accumulator import (
    AccumulatorOwner,
    MetricAccumulator,
    MetricReduceOp,
    sync_accumulators,
)

__all__ = ["AccumulatorOwner", "MetricAccumulator", "MetricReduceOp", "sync_accumulators"]
