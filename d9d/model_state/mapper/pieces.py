"""Tensors without data, described as pieces of source tensors: what a mapper makes of a checkpoint, worked out beforehand.

[Note: pieces]
What mappers do to weights is mostly copying: joining, cutting, stacking and transposing. So an output is a set of boxes,
each of which is a box of some source, perhaps with its dimensions in another order. Of a shard of the output, which is a box
too, this tells what must be read from where, and nothing else is.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

__all__ = ["Box", "Piece", "TensorPieces"]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it starts along each dimension, and how far it extends."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that is a box of a source.

    Attributes:
        box: The part of the tensor.
        source: Name of the source; None where the tensor is zero.
        source_box: The part of the source; empty for zeros.
        dims: For each dimension of the tensor, the dimension of the source that it runs along; None for one of size 1
            that the source does not have. Dimensions of the source that are not here have the size 1 in ``source_box``.
    """

    box: Box
    source: str | None
    source_box: Box
    dims: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor as pieces that cover it and do not overlap. See [Note: pieces]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, source: str, shape: Sequence[int], dtype: torch.dtype) -> "TensorPieces":
        """Return a source itself."""

    @classmethod
    def cat(cls, tensors: "Sequence[TensorPieces]", dim: int) -> "TensorPieces":
        """Join tensors along a dimension, as `torch.cat`."""

    @classmethod
    def stack(cls, tensors: "Sequence[TensorPieces]", dim: int) -> "TensorPieces":
        """Join tensors along a new dimension, as `torch.stack`."""

    def narrow(self, dim: int, start: int, length: int) -> "TensorPieces":
        """Cut a range out along a dimension, as `torch.narrow`."""

    def select(self, dim: int, index: int) -> "TensorPieces":
        """Take one entry along a dimension, which goes, as `torch.select`."""

    def transpose(self, first: int, second: int) -> "TensorPieces":
        """Exchange two dimensions, as `torch.transpose`."""

    def unsqueeze(self, dim: int) -> "TensorPieces":
        """Insert a dimension of size 1, as `torch.unsqueeze`."""

    def squeeze(self, dim: int | None = None) -> "TensorPieces":
        """Remove a dimension of size 1, or all of them, as `torch.squeeze`."""

    def pad(self, dim: int, length: int) -> "TensorPieces":
        """Append zeros along a dimension until it has a length."""

    def to(self, dtype: torch.dtype) -> "TensorPieces":
        """Convert to a dtype."""

    def within(self, box: Box) -> tuple[Piece, ...]:
        """Return the pieces of a box of the tensor, placed relative to its start."""

    def fill(self, target: torch.Tensor, box: Box, read: "Callable[[str, Box], torch.Tensor]") -> None:
        """Copy a box of the tensor into memory, converting to its dtype and device. No communication.

        Args:
            target: Tensor of the box's shape.
            box: Part of the tensor that the target is to hold.
            read: Returns a box of a source; a view is enough.
        """
