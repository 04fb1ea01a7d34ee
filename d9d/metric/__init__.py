"""Quantities that are accumulated on each rank and reduced over the ranks when they are wanted."""

from d9d.metric.base import Metric, is_better

__all__ = ["Metric", "is_better"]
