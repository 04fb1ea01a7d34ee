"""Mappers made from what is already known."""

from torch import nn

from d9d.model_state.mapper.base import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperIdentity


def identity_mapper_from_module(module: nn.Module) -> ModelStateMapper:
    """Return the mapper for a model state that has the layout of the module itself."""
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in module.state_dict()])


def identity_mapper_from_mapper_outputs(mapper: ModelStateMapper) -> ModelStateMapper:
    """Return a mapper that passes on what another one produces."""
    names = sorted({name for group in mapper.state_dependency_groups() for name in group.outputs})
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])
