"""Optimizers on distributed parameters."""

from d9d.optim.local_shards import localize_optimizer
from d9d.optim.named_state import SavedOptions, load_named_state, named_groups, named_state, room_for_state

__all__ = ["SavedOptions", "load_named_state", "localize_optimizer", "named_groups", "named_state", "room_for_state"]
