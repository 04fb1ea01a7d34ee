"""What a mapper has without writing it."""

import pytest
import torch

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.base import check_shapes, ordered_groups
from d9d.model_state.mapper.leaf import ModelStateMapperUnstackTensors
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
