"""Mappers made from what is already known."""

import torch
from torch import nn

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.adapters import (
    identity_mapper_from_mapper_outputs,
    identity_mapper_from_module,
    identity_mapper_from_names,
)
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperChunkTensors, ModelStateMapperDrop, ModelStateMapperRename


def identities(*names: str) -> set[StateGroup]:
    return {StateGroup(frozenset([name]), frozenset([name])) for name in names}


def test_a_module_maps_its_parameters_and_persistent_buffers():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    mapper = identity_mapper_from_module(module)
    batch_norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert mapper.state_dependency_groups() == identities("0.weight", "0.bias", *(f"1.{name}" for name in batch_norm))
    assert mapper.apply({"0.bias": module[0].bias})["0.bias"] is module[0].bias


def test_outputs_of_a_mapper():
    mapper: ModelStateMapper = ModelStateMapperParallel(
        [
            ModelStateMapperRename("a", "b"),
            ModelStateMapperChunkTensors("c", ["d", "e"], 0),
            ModelStateMapperDrop(["f"]),
        ]
    )
    assert identity_mapper_from_mapper_outputs(mapper).state_dependency_groups() == identities("b", "d", "e")


def test_names_map_to_themselves():
    mapper = identity_mapper_from_names(iter(["a.b", "c"]))
    assert mapper.state_dependency_groups() == identities("a.b", "c")
    value = torch.tensor(1)
    assert mapper.apply({"a.b": value})["a.b"] is value
    assert identity_mapper_from_names([]).state_dependency_groups() == frozenset()
