"""Mappers that combine others."""

from collections.abc import Sequence
from typing import final

import torch

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup


@final
class ModelStateMapperParallel(ModelStateMapper):
    """Runs mappers side by side; each handles its own tensors."""

    def __init__(self, mappers: Sequence[ModelStateMapper]) -> None:
        """Combine mappers.

        Raises:
            ValueError: If two mappers read, or produce, the same tensor.
        """
        self._by_input: dict[str, ModelStateMapper] = {}
        self._groups: set[StateGroup] = set()
        outputs: set[str] = set()
        collisions: set[str] = set()
        for mapper in mappers:
            for group in mapper.state_dependency_groups():
                collisions |= (group.inputs & self._by_input.keys()) | (group.outputs & outputs)
                self._by_input.update(dict.fromkeys(group.inputs, mapper))
                outputs |= group.outputs
                self._groups.add(group)
        if collisions:
            raise ValueError(f"several mappers read or produce the same tensors: {', '.join(sorted(collisions))}")

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the groups of all mappers."""
        return frozenset(self._groups)

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate a group by the mapper that declared it."""
        return self._by_input[next(iter(group))].apply(group)
