"""Parts of a mapper for pipeline ranks, by hand."""

import pytest
import torch

from d9d.model_state.mapper import StateGroup
from d9d.model_state.mapper.adapters import identity_mapper_from_names
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperTie,
)
from d9d.model_state.mapper.pieces import TensorPieces
from d9d_lightning.model_states.stage_parts import part_to_export, part_to_load

EMBED, HEAD = torch.arange(4.0).view(2, 2), torch.arange(6.0).view(3, 2)


def test_a_rank_loads_its_own_tensors_only():
    mapper = ModelStateMapperParallel(
        [
            ModelStateMapperTie(["tokens", "logits"], ["embed", "head"]),
            ModelStateMapperChunkTensors("layers", ["layers.0", "layers.1"], 0),
            identity_mapper_from_names(["norm"]),
        ]
    )
    whole = ["embed", "layers.0", "layers.1", "norm", "head"]
    last = part_to_load(mapper, ["layers.1", "head", "own.only"], whole)
    assert last.state_dependency_groups() == {
        StateGroup.of(["tokens", "logits"], ["head"]),
        StateGroup.of(["layers"], ["layers.1"]),
    }
    assert last.optional_inputs() == {"logits"}
    made = last.apply({"layers": HEAD[:2]})
    assert made.keys() == {"layers.1"}
    assert torch.equal(made["layers.1"], HEAD[1:2])
    traced = last.trace({"tokens": TensorPieces.whole("tokens", (2, 2), torch.float32)})
    assert traced is not None
    assert traced.keys() == {"head"}
    with pytest.raises(ValueError, match=r"does not have: 'head' \(nearest: 'heads'\)"):
        part_to_load(mapper, [], [*whole[:-1], "heads"])


def test_each_group_is_exported_by_one_rank():
    mapper = ModelStateMapperParallel(
        [identity_mapper_from_names(["a", "b", "shared"]), ModelStateMapperConcatenateTensors(["c", "d"], "cd", 0)]
    )
    names_by_rank = [["a", "shared"], ["b", "c", "d", "shared"]]
    parts = [part_to_export(mapper, names_by_rank, rank, last_rank=1) for rank in range(2)]
    assert parts[0].state_dependency_groups() == {StateGroup.of("a", "a")}
    assert parts[1].state_dependency_groups() == {
        StateGroup.of("b", "b"),
        StateGroup.of(["c", "d"], ["cd"]),
        StateGroup.of(["shared"], ["shared"]),
    }
    assert torch.equal(parts[1].apply({"b": EMBED})["b"], EMBED)
    with pytest.raises(ValueError, match=r"several pipeline stages together, which no rank has: 'c', 'd'\. Export"):
        part_to_export(mapper, [["a", "shared", "c"], ["b", "d"]], 0, last_rank=1)
    with pytest.raises(ValueError, match=r"does not have: 'shared' \(nearest: 'shard'\)"):
        part_to_export(mapper, [["a"], ["b", "c", "d", "shard"]], 0, last_rank=1)
