"""Dataclasses as nodes, None, order, paths and specs as leaves."""

import collections
import dataclasses
import threading
from typing import Any

import pytest
import torch

from d9d.core.pytree import (
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from d9d.core.types import TensorSpec


@dataclasses.dataclass
class Inner:
    z: Any
    a: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    values: list
    missing: Any = None


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_dataclasses_are_nodes_in_field_order_and_none_holds_no_leaf():
    tree = {"b": Outer(inner=Inner(1, 2), values=[3, (4, None)]), "a": Pair(5, 6)}
    leaves, spec = tree_flatten(tree)
    assert leaves == [5, 6, 1, 2, 3, 4]
    assert tree_unflatten(spec, leaves) == tree


def test_map_keeps_types_and_the_original():
    tree = Outer(inner=Inner(1, 2.5), values=["x"])
    assert tree_map(str, tree) == Outer(inner=Inner("1", "2.5"), values=["x"])
    assert tree_map_only((int, str), lambda leaf: leaf * 2, tree) == Outer(inner=Inner(2, 2.5), values=["xx"])
    assert tree.inner.a == 2.5


def test_paths_name_fields_keys_and_indices():
    tree = {"k": Outer(inner=Inner(1, 2), values=[3])}
    assert tree_leaves_with_path(tree) == [
        (("k", "inner", "z"), 1),
        (("k", "inner", "a"), 2),
        (("k", "values", 0), 3),
    ]


def test_post_init_does_not_see_stand_ins():
    @dataclasses.dataclass
    class OnlyTensors:
        value: Any
        shape: Any = dataclasses.field(init=False)

        def __post_init__(self):
            self.shape = self.value.shape

    mapped = tree_map_only(torch.Tensor, lambda _: None, OnlyTensors(torch.zeros(2)))
    assert mapped.value is None


def test_specs_are_leaves_and_classes_too():
    spec = TensorSpec(shape=(2, 3), dtype=torch.float32)
    assert tree_leaves([spec, Inner]) == [spec, Inner]


def test_is_leaf_may_stop_at_an_unseen_dataclass():
    @dataclasses.dataclass
    class Unseen:
        value: int

    node = Unseen(1)
    assert tree_leaves([node], is_leaf=lambda value: isinstance(value, Unseen)) == [node]
    assert tree_leaves([node]) == [1]


def test_structures_compare_and_wrong_counts_are_refused():
    _, spec = tree_flatten(Inner(1, [2]))
    assert spec == tree_flatten(Inner(5, [6]))[1]
    assert spec != tree_flatten(Inner(5, 6))[1]
    with pytest.raises(ValueError, match="leaves"):
        tree_unflatten(spec, [1])


def test_threads_register_one_class_together():
    for _ in range(20):

        @dataclasses.dataclass
        class Fresh:
            value: int

        found: list[list[int]] = []
        start = threading.Barrier(4)

        def walk(node, found=found, start=start):
            start.wait()
            found.append(tree_leaves(node))

        threads = [threading.Thread(target=walk, args=(Fresh(7),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[7]] * 4
