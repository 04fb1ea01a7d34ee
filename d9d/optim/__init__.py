"""Optimizers on distributed parameters."""

from d9d.optim.local_shards import localize_optimizer

__all__ = ["localize_optimizer"]
