"""Graphs of state mappers, which translate between layouts of weights."""

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup

__all__ = ["ModelStateMapper", "StateGroup"]
