"""What crosses the boundary between two stages: a tree of tensors, as the leaves that are sent."""

from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from d9d.core.pytree import PyTreeSpec, tree_flatten, tree_unflatten
from d9d.core.types import PyTree, TensorSpec

__all__ = ["BoundaryKind", "BoundarySpec", "flatten_output"]

BoundaryKind: TypeAlias = tuple[PyTreeSpec | None, tuple[object, ...]]
"""What two ranks agree on once for a boundary: the structure, and the type of each leaf, but no shapes."""


# Leaves are tensors or, where a stage passes on plain values, anything.
def flatten_output(output: PyTree[Any]) -> tuple[list[Any], PyTreeSpec | None]:
    """Split what a stage has returned into leaves and structure; None stands for a single tensor."""
    if isinstance(output, torch.Tensor):
        return [output], None
    return tree_flatten(output)


class BoundarySpec:
    """What one microbatch sends over a boundary, from `stage_transfer_spec`.

    A leaf that is no `TensorSpec` is a constant, which both sides know and nobody sends.
    """

    __slots__ = ("_treespec", "kind", "leaves", "source", "tensors")

    def __init__(self, spec: PyTree[TensorSpec]) -> None:
        """Flatten a tree of specs."""
        self.source = spec
        self.leaves: list[Any]
        self._treespec: PyTreeSpec | None
        self.leaves, self._treespec = ([spec], None) if type(spec) is TensorSpec else tree_flatten(spec)
        self.tensors = [leaf for leaf in self.leaves if type(leaf) is TensorSpec]
        """The leaves that are sent."""
        types = tuple(leaf.dtype if type(leaf) is TensorSpec else None for leaf in self.leaves)
        self.kind: BoundaryKind = (self._treespec, types)

    def unflatten(self, tensors: list[torch.Tensor]) -> PyTree[Any]:
        """Build what the stage gets from the tensors that were received."""
        if self._treespec is None:
            return tensors[0]
        received = iter(tensors)
        leaves = [next(received) if type(leaf) is TensorSpec else leaf for leaf in self.leaves]
        return tree_unflatten(self._treespec, leaves)

    def describe(self) -> str:
        """Write the spec for an error message, one leaf with its path after the other."""
        return _describe(self.leaves, self._treespec)

    def sendable_leaves(self, leaves: list[Any], treespec: PyTreeSpec | None) -> list[torch.Tensor]:
        """Check what a stage has produced against the spec, and return the tensors to send.

        Raises:
            ValueError: If structure, shapes, types or constants differ, with both specs.
            TypeError: If a leaf is a distributed tensor.
        """
        if treespec != self._treespec:
            raise self._mismatch(leaves, treespec)
        tensors: list[torch.Tensor] = []
        for leaf, spec in zip(leaves, self.leaves, strict=True):
            if type(spec) is TensorSpec:
                if not isinstance(leaf, torch.Tensor) or not _fits(leaf, spec):
                    raise self._mismatch(leaves, treespec)
                tensors.append(leaf)
            elif leaf is not spec and not _is_equal(leaf, spec):
                raise self._mismatch(leaves, treespec)
        return tensors

    def _mismatch(self, leaves: list[Any], treespec: PyTreeSpec | None) -> ValueError:
        return ValueError(
            "the stage produced something else than its stage_transfer_spec(pipeline_input, StageBoundary.outgoing) says.\n"
            f"  produced:  {_describe([_spec_of(leaf) for leaf in leaves], treespec)}\n"
            f"  specified: {self.describe()}\n"
            "Return what the spec says, or mend stage_transfer_spec() on both sides of the boundary."
        )


def _is_equal(leaf: object, constant: object) -> bool:
    try:
        return not isinstance(leaf, torch.Tensor) and bool(leaf == constant)
    except (TypeError, ValueError, RuntimeError):  # an array, for example
        return False


def _fits(leaf: torch.Tensor, spec: TensorSpec) -> bool:
    if isinstance(leaf, DTensor):
        raise TypeError(
            f"a stage returned a DTensor of shape {tuple(leaf.shape)} and placements {leaf.placements}. Stages exchange "
            f"local tensors: return x.to_local(), and give its local shape in stage_transfer_spec()."
        )
    return leaf.shape == spec.shape and leaf.dtype is spec.dtype and leaf.layout is torch.strided is spec.layout


def _spec_of(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(shape=tuple(leaf.shape), dtype=leaf.dtype, layout=leaf.layout)
    return leaf


def _describe(leaves: list[Any], treespec: PyTreeSpec | None) -> str:
    if treespec is None:
        return _describe_leaf(leaves[0])
    paths = treespec.paths()
    return ", ".join(f"{_path(path)}: {_describe_leaf(leaf)}" for path, leaf in zip(paths, leaves, strict=True))


def _describe_leaf(leaf: object) -> str:
    if not isinstance(leaf, TensorSpec):
        return repr(leaf)
    layout = "" if leaf.layout == torch.strided else f", {leaf.layout}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}{layout}"


def _path(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".") or "value"
