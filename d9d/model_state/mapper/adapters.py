"""Mappers made from what is already known."""

from collections.abc import Iterable

from torch import nn

from d9d.model_state.mapper.base import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperIdentity

__all__ = ["identity_mapper_from_mapper_outputs", "identity_mapper_from_module", "identity_mapper_from_names"]


def identity_mapper_from_names(names: Iterable[str]) -> ModelStateMapper:
    """Return the mapper that passes every tensor on under its own name."""
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])


def identity_mapper_from_module(module: nn.Module) -> ModelStateMapper:
    """Return the mapper for a model state that has the layout of the module itself."""
    return identity_mapper_from_names(module.state_dict())


def identity_mapper_from_mapper_outputs(mapper: ModelStateMapper) -> ModelStateMapper:
    """Return a mapper that passes on what another one produces."""
    return identity_mapper_from_names(
        sorted(name for group in mapper.state_dependency_groups() for name in group.outputs)
    )
