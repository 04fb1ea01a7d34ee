"""What crosses the boundary between two stages: a tree of tensors, as the leaves that are sent."""

import dataclasses
import zlib
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


@dataclasses.dataclass(frozen=True, slots=True)
class BoundarySpec:
    """What one microbatch sends over a boundary, from `stage_transfer_spec`.

    A leaf that is no `TensorSpec` is a constant, which both sides know and nobody sends.
    """

    leaves: list[Any]
    treespec: PyTreeSpec | None

    @classmethod
    def of(cls, spec: PyTree[TensorSpec]) -> "BoundarySpec":
        """Flatten a tree of specs."""
        if type(spec) is TensorSpec:
            return cls([spec], None)
        return cls(*tree_flatten(spec))

    @property
    def kind(self) -> BoundaryKind:
        """Structure and types."""
        return self.treespec, tuple(leaf.dtype if type(leaf) is TensorSpec else None for leaf in self.leaves)

    @property
    def tensors(self) -> list[TensorSpec]:
        """The specs of the leaves that are sent."""
        return [leaf for leaf in self.leaves if type(leaf) is TensorSpec]

    def unflatten(self, tensors: list[torch.Tensor]) -> PyTree[Any]:
        """Build what the stage gets from the tensors that were received."""
        if self.treespec is None:
            return tensors[0]
        received = iter(tensors)
        return tree_unflatten(
            self.treespec, [next(received) if type(leaf) is TensorSpec else leaf for leaf in self.leaves]
        )

    def digest(self) -> int:
        """Return a number that is the same on all ranks for the same spec, shapes included."""
        return zlib.crc32(self.describe().encode())

    def describe(self) -> str:
        """Write the spec for an error message, one leaf with its path after the other."""
        if self.treespec is None:
            return _describe_leaf(self.leaves[0])
        paths = self.treespec.paths()
        return ", ".join(
            f"{_path(path)}: {_describe_leaf(leaf)}" for path, leaf in zip(paths, self.leaves, strict=True)
        )

    def sendable_leaves(self, leaves: list[Any], treespec: PyTreeSpec | None) -> list[torch.Tensor]:
        """Check what a stage has produced against the spec, and return the tensors to send.

        Raises:
            ValueError: If structure, shapes, types or constants differ, with both specs.
            TypeError: If a leaf is a distributed tensor.
        """
        if treespec != self.treespec:
            raise self._mismatch(leaves, treespec)
        tensors: list[torch.Tensor] = []
        for leaf, spec in zip(leaves, self.leaves, strict=True):
            if type(spec) is not TensorSpec:
                if isinstance(leaf, torch.Tensor) or leaf != spec:
                    raise self._mismatch(leaves, treespec)
                continue
            if not isinstance(leaf, torch.Tensor) or leaf.shape != spec.shape or leaf.dtype != spec.dtype:
                raise self._mismatch(leaves, treespec)
            if isinstance(leaf, DTensor):
                raise TypeError(
                    f"a stage returned a DTensor of shape {tuple(leaf.shape)} and placements {leaf.placements}. Stages "
                    f"exchange local tensors: return x.to_local(), and give its local shape in stage_transfer_spec()."
                )
            if leaf.layout != spec.layout or leaf.layout != torch.strided:
                raise self._mismatch(leaves, treespec)
            tensors.append(leaf)
        return tensors

    def _mismatch(self, leaves: list[Any], treespec: PyTreeSpec | None) -> ValueError:
        actual = BoundarySpec([_spec_of(leaf) for leaf in leaves], treespec)
        return ValueError(
            "the stage produced something else than its stage_transfer_spec(pipeline_input, StageBoundary.outgoing) says.\n"
            f"  produced:  {actual.describe()}\n"
            f"  specified: {self.describe()}\n"
            "Return what the spec says, or mend stage_transfer_spec() on both sides of the boundary."
        )


def _spec_of(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(shape=tuple(leaf.shape), dtype=leaf.dtype, layout=leaf.layout)
    return leaf


def _describe_leaf(leaf: object) -> str:
    if not isinstance(leaf, TensorSpec):
        return repr(leaf)
    layout = "" if leaf.layout == torch.strided else f", {leaf.layout}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}{layout}"


def _path(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".") or "value"
