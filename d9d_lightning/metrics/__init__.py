"""torchmetrics under a mesh: states are gathered over the ranks that hold different data, and over no others."""

from d9d_lightning.metrics.domains import MetricDomain
from d9d_lightning.metrics.install import sync_over
from d9d_lightning.metrics.sync import synced_together

__all__ = ["MetricDomain", "sync_over", "synced_together"]
