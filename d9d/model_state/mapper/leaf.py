"""Mappers that translate tensors themselves."""

from typing import final

import torch

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup


@final
class ModelStateMapperIdentity(ModelStateMapper):
    """Passes one tensor on under its own name."""

    def __init__(self, name: str) -> None:
        """Take the name of the tensor."""
        self._name = name

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup(inputs=frozenset([self._name]), outputs=frozenset([self._name]))])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensor."""
        return {self._name: group[self._name]}
