"""Metrics. Import from `aggregation`, `classification`, `container` and `torchmetrics`."""
