"""Weights with their adapters added, as a mapper of model states."""

from typing import final

import torch

from d9d.model_state.mapper import ModelStateMapper, StateGroup

from .lora_layers import low_rank_product

__all__ = ["ModelStateMapperMergeLoRA"]


@final
class ModelStateMapperMergeLoRA(ModelStateMapper):
    """Adds the adapter of one layer to its weight: ``q.base.weight`` and both factors become ``q.weight``, in its dtype."""

    def __init__(self, name: str, factors: tuple[str, str], scale: float) -> None:
        """Take the layer.

        Args:
            name: Name of the layer, without the dot at its end.
            factors: Names within it of the two modules whose weights, multiplied in this order, are added.
            scale: Factor on their product.
        """
        self._base, self._merged = f"{name}.base.weight", f"{name}.weight"
        self._first, self._second = (f"{name}.{factor}.weight" for factor in factors)
        self._scale = scale

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of weight and factors."""
        return frozenset([StateGroup.of([self._base, self._first, self._second], [self._merged])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sum, which is rounded once."""
        weight = group[self._base]
        product = low_rank_product(group[self._first], group[self._second], self._scale)
        return {self._merged: (weight + product).to(weight.dtype)}

    def inverse(self) -> ModelStateMapper:
        """Refuse: a sum does not tell its parts.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self._merged} does not tell what its adapter has added. Load {self._base} and the adapter from a checkpoint."
        )
