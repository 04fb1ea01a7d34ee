"""Fused operations, each with a plain path that runs anywhere."""
