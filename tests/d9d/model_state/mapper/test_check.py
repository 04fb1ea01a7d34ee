"""What `check_mapper` finds, all at once."""

import time

import pytest
import torch

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.check import check_mapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDrop,
    ModelStateMapperRename,
    ModelStateMapperTie,
)


class Declares(ModelStateMapper):
    """A mapper of somebody else, with any groups."""

    def __init__(self, *groups: tuple[str, str]):
        self.groups = groups

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset(StateGroup(frozenset(ins.split()), frozenset(outs.split())) for ins, outs in self.groups)

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError


GRAPH = ModelStateMapperSequential(
    [
        ModelStateMapperParallel([ModelStateMapperRename(f"model.{part}.weight", part) for part in ("q", "k", "v")]),
        ModelStateMapperParallel(
            [
                ModelStateMapperConcatenateTensors(["q", "k", "v"], "attn.qkv.weight", 0),
                ModelStateMapperTie(["embed.weight", "lm_head.weight"], ["embed.weight", "head.weight"]),
                ModelStateMapperDrop(["rotary.inv_freq"]),
            ]
        ),
    ]
)
SOURCES = ["model.q.weight", "model.k.weight", "model.v.weight", "embed.weight"]
TARGETS = ["attn.qkv.weight", "embed.weight", "head.weight"]


def test_what_fits_passes():
    check_mapper(GRAPH)
    check_mapper(GRAPH, sources=SOURCES, targets=TARGETS)
    check_mapper(GRAPH, sources=[*SOURCES, "lm_head.weight", "rotary.inv_freq", "unused"], targets=TARGETS)
    check_mapper(ModelStateMapperParallel([]), sources=[], targets=[])


def test_everything_that_is_wrong_comes_in_one_error():
    sources = ["model.q.weight", "model.key.weight", "model.v.weight", "embed.weight"]
    with pytest.raises(ValueError, match="cannot be used") as raised:
        check_mapper(GRAPH, sources=sources, targets=["attn.kqv.weight", "embed.weight", "norm"])
    missing, unasked, without_producer = str(raised.value).splitlines()[1:]
    assert "there is no source: 'model.k.weight' (nearest: 'model.key.weight')" in missing
    assert "outputs that no target asks for: 'attn.qkv.weight' (nearest: 'attn.kqv.weight'), 'head.weight'" in unasked
    assert "that nothing produces: 'attn.kqv.weight' (nearest: 'attn.qkv.weight'), 'norm'" in without_producer


def test_groups_that_collide_or_read_nothing():
    with pytest.raises(ValueError, match="cannot be used") as raised:
        check_mapper(Declares(("a b", "x"), ("b c", "y"), ("d", "y"), ("", "z")))
    message = str(raised.value)
    assert "read by more than one group: 'b' ('a', 'b' -> 'x'; 'b', 'c' -> 'y')" in message
    assert "produced by more than one group: 'y' ('b', 'c' -> 'y'; 'd' -> 'y')" in message
    assert "groups that read nothing: nothing -> 'z'" in message


@pytest.mark.parametrize("compose", [ModelStateMapperParallel, ModelStateMapperSequential])
def test_compositions_check_mappers_of_others(compose: type[ModelStateMapperParallel]):
    with pytest.raises(ValueError, match="read by more than one group: 'b'"):
        compose([Declares(("a b", "x"), ("b c", "y"))])
    with pytest.raises(ValueError, match="read nothing"):
        compose([Declares(("", "x"))])


def test_a_composition_that_contains_itself():
    class Lazy(ModelStateMapper):
        def __init__(self):
            self.children: list[ModelStateMapper] = [self]

        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset().union(*(child.state_dependency_groups() for child in self.children))

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self.children[0].apply(group)

    with pytest.raises(ValueError, match="Lazy contains itself"):
        check_mapper(Lazy())
    for compose in (ModelStateMapperParallel, ModelStateMapperSequential):
        with pytest.raises(ValueError, match="Lazy contains itself"):
            compose([Lazy()])


@pytest.mark.slow
def test_thousands_of_wrong_names_are_named_in_bounded_text_and_time():
    names = [f"model.layers.{index}.mlp.{part}.weight" for index in range(10_000) for part in ("up", "down")]
    mapper = ModelStateMapperParallel([ModelStateMapperRename(name, name) for name in names])
    start = time.process_time()
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.down.weight'.* and 19990 more") as raised:
        check_mapper(mapper, sources=[name.replace("mlp", "ffn") for name in names])
    assert "'model.layers.0.mlp.up.weight' (nearest: 'model.layers.0.ffn.up.weight')" in str(raised.value)
    assert len(str(raised.value)) < 2000
    assert time.process_time() - start < 5
