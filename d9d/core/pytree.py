"""Walks nested inputs, outputs and states; dataclasses are nodes without being registered by the user.

[Note: why optree]
Measured on one CPU thread, torch 2.13 and optree 0.20, microseconds for ``flatten / unflatten / map``, torch's own
Python ``torch.utils._pytree`` against optree:

====================================  ==================  ================
tree                                  torch               optree
====================================  ==================  ================
dict of 3 tensors                     3.3 / 1.7 / 5.9     1.6 / 0.4 / 2.7
16 leaves in dicts and dataclasses    28 / 12 / 42        5.1 / 1.6 / 7.8
64 leaves in dicts and dataclasses    91 / 53 / 149       27 / 7.2 / 37
====================================  ==================  ================

A registration in torch's module is seen by every library of the process, and None is a leaf there, so that an
optional field that is absent would reach ``tensor.to``. Here the registry is our own and None holds no leaf.
Importing optree takes 25 ms and does not import torch.
"""

import dataclasses
import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeAlias, TypeVar, cast

import optree

from d9d.core.types import PyTree, TensorSpec

TLeaf = TypeVar("TLeaf")
TMapped = TypeVar("TMapped")
TTree = TypeVar("TTree")

# A node of a tree may be anything.
IsLeaf: TypeAlias = Callable[[Any], bool]
"""Tells for a node, from the root down, whether the walk stops there and takes it as a leaf."""

PyTreeSpec: TypeAlias = optree.PyTreeSpec
"""The structure of a tree without its leaves. Comparable; as a key, hashable."""

_NAMESPACE = "d9d"
_KNOWN_TYPES: set[type] = {TensorSpec}
"""Types that have been seen as leaves; those of them that are dataclasses are nodes since then. Grows only."""
_REGISTRY_LOCK = threading.Lock()


def tree_flatten(tree: PyTree[TLeaf], is_leaf: IsLeaf | None = None) -> tuple[list[TLeaf], PyTreeSpec]:
    """Split a tree into its leaves and its structure.

    Dicts are walked in the order of their sorted keys, dataclasses in the order of their fields. All of a dataclass's
    fields are part of the tree, also those of types that are not tensors.
    """
    while True:
        num_known = len(_KNOWN_TYPES)
        leaves, spec = optree.tree_flatten(cast("Any", tree), is_leaf, namespace=_NAMESPACE)
        _learn_types(leaves)
        # Walk again if this thread, or another one meanwhile, has made nodes of what the walk took for leaves.
        if len(_KNOWN_TYPES) == num_known:
            return cast("list[TLeaf]", leaves), spec


def tree_unflatten(treespec: PyTreeSpec, leaves: Iterable[TLeaf]) -> PyTree[TLeaf]:
    """Build a tree from its structure and as many leaves as it has.

    Dataclasses are filled field by field: neither ``__init__`` nor ``__post_init__`` runs, because the leaves may be
    stand-ins (specs, gradients, None) that the class would refuse.

    Raises:
        ValueError: If the number of leaves is wrong.
    """
    return optree.tree_unflatten(treespec, leaves)


def tree_leaves(tree: PyTree[TLeaf], is_leaf: IsLeaf | None = None) -> list[TLeaf]:
    """Return the leaves, in the order of `tree_flatten`."""
    leaves, _ = tree_flatten(tree, is_leaf)
    return leaves


def tree_leaves_with_path(
    tree: PyTree[TLeaf], is_leaf: IsLeaf | None = None
) -> list[tuple[tuple[Any, ...], TLeaf]]:  # a dict key may be any hashable value
    """Return each leaf after its path: dict keys, sequence indices and names of dataclass fields from the root down."""
    leaves, spec = tree_flatten(tree, is_leaf)
    return list(zip(spec.paths(), leaves, strict=True))


def tree_map(func: Callable[[TLeaf], TMapped], tree: PyTree[TLeaf]) -> PyTree[TMapped]:
    """Return the tree with ``func`` applied to each leaf."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(spec, map(func, leaves))


# The function is only ever called with instances of `filters`; the type system can not follow that.
def tree_map_only(filters: type | tuple[type, ...], func: Callable[[Any], Any], tree: TTree) -> TTree:
    """Return the tree with ``func`` applied to the leaves that are instances of ``filters``, the others as they are."""
    return cast("TTree", tree_map(lambda leaf: func(leaf) if isinstance(leaf, filters) else leaf, tree))


def _learn_types(leaves: list[Any]) -> None:
    """Make nodes of the dataclasses among the leaves that nobody has seen yet.

    In the steady state this is one superset test over the leaf types: 0.2-1.4 microseconds for 3-64 leaves.
    """
    if _KNOWN_TYPES.issuperset(map(type, leaves)):
        return
    with _REGISTRY_LOCK:
        for cls in set(map(type, leaves)) - _KNOWN_TYPES:
            if dataclasses.is_dataclass(cls):
                _register_dataclass(cls)
            _KNOWN_TYPES.add(cls)


def _register_dataclass(cls: type) -> None:
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten(node: object) -> tuple[list[Any], None, tuple[str, ...]]:
        children = [getattr(node, name) for name in names]  # introspection: any dataclass is a node
        return children, None, names

    # Optree's type for what it builds is Collection, although anything works.
    def unflatten(_: Hashable, children: Iterable[Any]) -> Collection[Any]:
        node = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(node, name, child)
        return cast("Collection[Any]", node)

    optree.register_pytree_node(cls, flatten, unflatten, namespace=_NAMESPACE)
