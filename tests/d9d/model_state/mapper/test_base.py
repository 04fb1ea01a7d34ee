"""What a mapper has without writing it."""

import pytest
import torch

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.base import check_shapes, ordered_groups, runnable_groups
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperDrop,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperUnstackTensors,
)
from d9d.model_state.mapper.pieces import TensorPieces


class Swap(ModelStateMapper):
    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset([StateGroup.of("ba", "c"), StateGroup.of(["0"], [])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"c": group["a"]}


def test_defaults():
    mapper = Swap()
    assert mapper.optional_inputs() == frozenset()
    assert mapper.trace({"a": TensorPieces.whole("a", (), torch.float32)}) is None
    assert mapper.explain() == "0 -> nothing  (Swap)\na, b -> c  (Swap)"
    with pytest.raises(NotImplementedError, match="Swap has no inverse: write the mapper of the other direction"):
        mapper.inverse()


def test_groups_are_ordered_by_name():
    groups = [StateGroup.of([name, "z" + name], [name]) for name in "cab"]
    assert [min(group.inputs) for group in ordered_groups(groups)] == ["a", "b", "c"]
    assert StateGroup.of("ab", "c") == StateGroup(inputs=frozenset("ab"), outputs=frozenset("c"))


def test_shapes_are_refused_with_names():
    mapper = ModelStateMapperUnstackTensors("experts.weight", ["0", "1"], 0)
    check_shapes(mapper, {"experts.weight": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"'experts.weight' has 3 entries"):
        check_shapes(mapper, {"experts.weight": torch.zeros(3, 2)})


class Chosen(ModelStateMapper):
    """Groups and optional inputs as they are given."""

    def __init__(self, groups: list[StateGroup], optional: str = "") -> None:
        self._groups, self._optional = frozenset(groups), frozenset(optional)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return self._groups

    def optional_inputs(self) -> frozenset[str]:
        return self._optional

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise AssertionError(group)


@pytest.mark.parametrize(
    ("inputs", "outputs", "optional", "available", "lacking"),
    [
        ("ab", "x", "", "abc", []),
        ("ab", "x", "", "b", ["a"]),
        ("ba", "x", "", "", ["a", "b"]),
        ("ab", "x", "b", "a", []),
        ("ab", "x", "b", "b", ["a"]),
        ("ab", "x", "b", "", ["a"]),
        ("ab", "x", "ab", "b", []),
        ("ab", "x", "ab", "", ["a", "b"]),  # of nothing, nothing can be made
        ("a", "", "a", "", None),
        ("a", "", "a", "a", None),
        ("a", "", "", "a", None),
        ("a", "", "", "", ["a"]),
    ],
)
def test_groups_that_can_be_run(inputs: str, outputs: str, optional: str, available: str, lacking: list[str] | None):
    """`lacking` is None where the group is neither run nor missed."""
    group = StateGroup.of(inputs, outputs)
    expected = ([] if lacking or lacking is None else [group], {group: lacking} if lacking else {})
    assert runnable_groups(Chosen([group], optional), available) == expected


def test_groups_to_run_are_in_the_order_of_names():
    groups = [StateGroup.of(name + name.upper(), name) for name in "dcba"]
    runnable, lacking = runnable_groups(Chosen(groups), "abBdDC")
    assert runnable == [groups[2], groups[0]]
    assert list(lacking.items()) == [(groups[3], ["A"]), (groups[1], ["c"])]


def test_what_compositions_drop_need_not_be_there():
    mapper = ModelStateMapperSequential(
        [
            ModelStateMapperParallel([ModelStateMapperRename("ids", "i"), ModelStateMapperDrop(["rotary"])]),
            ModelStateMapperDrop(["i"]),
            ModelStateMapperIdentity("weight"),
        ]
    )
    assert runnable_groups(mapper, ["weight"]) == ([StateGroup.of(["weight"], ["weight"])], {})
