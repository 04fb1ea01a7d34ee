"""Tensors without data, described as pieces of source tensors: what a mapper makes of a checkpoint, worked out beforehand.

[Note: pieces]
What mappers do to weights is mostly copying: joining, cutting, stacking and transposing. So an output is a set of boxes,
each of which is a box of some source, perhaps with its dimensions in another order. Of a shard of the output, which is a box
too, this tells what must be read from where, and nothing else is.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from d9d.model_state.mapper.names import listed

__all__ = ["Box", "Piece", "TensorPieces"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it starts along each dimension, and how far it extends."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that is a box of a source.

    Attributes:
        box: The part of the tensor; never empty.
        source: Name of the source; None where the tensor is zero.
        source_box: The part of the source; without dimensions for zeros.
        dims: For each dimension of the tensor, the dimension of the source that it runs along; None for one of size 1
            that the source does not have. Dimensions of the source that are not here have the size 1 in ``source_box``.
        dtypes: What the values of the source are converted to, in this order: rounding to a narrow dtype on the way
            must not be lost.
    """

    box: Box
    source: str | None
    source_box: Box
    dims: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...] = ()

    def narrowed(self, dim: int, start: int, end: int) -> "Piece | None":
        """Return what lies between two positions of the tensor along a dimension, placed relative to the first."""
        box, source_box = self.box, self.source_box
        own_start = box.start[dim]
        first, last = max(own_start, start), min(own_start + box.shape[dim], end)
        if first >= last:
            return None
        size = last - first
        source_dim = self.dims[dim]
        if source_dim is not None and size != box.shape[dim]:
            source_start = source_box.start[source_dim] + first - own_start
            source_box = Box(
                _replaced(source_box.start, source_dim, source_start), _replaced(source_box.shape, source_dim, size)
            )
        placed = Box(_replaced(box.start, dim, first - start), _replaced(box.shape, dim, size))
        return Piece(placed, self.source, source_box, self.dims, self.dtypes)

    def moved(self, dim: int, distance: int) -> "Piece":
        """Return the same piece further along a dimension of the tensor."""
        if distance == 0:
            return self
        start = _replaced(self.box.start, dim, self.box.start[dim] + distance)
        return Piece(Box(start, self.box.shape), self.source, self.source_box, self.dims, self.dtypes)

    def with_new_dim(self, dim: int) -> "Piece":
        """Return the piece with a dimension of size 1 more, before another one."""
        box = Box(_inserted(self.box.start, dim, 0), _inserted(self.box.shape, dim, 1))
        return Piece(box, self.source, self.source_box, _inserted(self.dims, dim, None), self.dtypes)

    def without_dim(self, dim: int) -> "Piece":
        """Return the piece without a dimension, which must have the size 1."""
        box = Box(_removed(self.box.start, dim), _removed(self.box.shape, dim))
        return Piece(box, self.source, self.source_box, _removed(self.dims, dim), self.dtypes)

    def transposed(self, first: int, second: int) -> "Piece":
        """Return the piece with two dimensions exchanged."""
        box = Box(_exchanged(self.box.start, first, second), _exchanged(self.box.shape, first, second))
        return Piece(box, self.source, self.source_box, _exchanged(self.dims, first, second), self.dtypes)

    def copy_to(self, target: torch.Tensor, read: Callable[[str, Box], torch.Tensor]) -> None:
        """Read the piece and copy it to its place in a tensor."""
        part = target if self.box.shape == target.shape else target[self.box.slices]
        if self.source is None:
            part.zero_()
            return
        values = read(self.source, self.source_box)
        if tuple(values.shape) != self.source_box.shape:
            raise ValueError(
                f"read {tuple(values.shape)} of '{self.source}' where {self.source_box.shape} was asked for, from "
                f"{self.source_box.start} on."
            )
        values = self.arranged(values)
        for dtype in self.dtypes:
            values = values.to(dtype)
        part.copy_(values)

    def arranged(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the source box as a view in the shape of the box; `dtypes` are left to the caller."""
        if self.dims == tuple(range(values.ndim)):
            return values
        kept = [dim for dim in self.dims if dim is not None]
        gone = [dim for dim in range(values.ndim) if dim not in kept]
        entries = [None if dim is None else slice(None) for dim in self.dims]
        return values.permute(kept + gone)[(*entries, *(0 for _ in gone))]

    def within_source(self, box: Box) -> "Piece | None":
        """Return what of the piece comes from a box of its source, at its place in the tensor; None if nothing does.

        Zeros come from no source.
        """
        if self.source is None:
            return None
        start, shape = list(self.box.start), list(self.box.shape)
        source_start, source_shape = list(self.source_box.start), list(self.source_box.shape)
        for source_dim, (own_start, size) in enumerate(zip(source_start, source_shape, strict=True)):
            first = max(own_start, box.start[source_dim])
            last = min(own_start + size, box.start[source_dim] + box.shape[source_dim])
            if first >= last:
                return None
            source_start[source_dim], source_shape[source_dim] = first, last - first
            if source_dim in self.dims:
                dim = self.dims.index(source_dim)
                start[dim] += first - own_start
                shape[dim] = last - first
        placed, source_box = Box(tuple(start), tuple(shape)), Box(tuple(source_start), tuple(source_shape))
        return Piece(placed, self.source, source_box, self.dims, self.dtypes)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor as pieces that cover it and do not overlap. See [Note: pieces].

    The methods are those of `torch.Tensor`, negative dimensions included. What torch refuses with `RuntimeError`, they
    refuse with `ValueError`, and they name the sources.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, source: str, shape: Sequence[int], dtype: torch.dtype) -> "TensorPieces":
        """Return a source itself."""
        box = Box.whole(shape)
        pieces = () if 0 in box.shape else (Piece(box, source, box, tuple(range(len(box.shape)))),)
        return cls(box.shape, dtype, pieces)

    @classmethod
    def cat(cls, tensors: "Sequence[TensorPieces]", dim: int) -> "TensorPieces":
        """Join tensors along a dimension, as `torch.cat`.

        Raises:
            IndexError: If they have no such dimension.
            ValueError: If there are no tensors, or their other dimensions differ.
        """
        dtype = _common_dtype(tensors)
        # torch's rule of old: vectors without elements join anything
        tensors = [tensor for tensor in tensors if tensor.shape != (0,)] or tensors[:1]
        first = tensors[0]
        dim = first._wrapped(dim)
        pieces: list[Piece] = []
        length = 0
        for tensor in tensors:
            if not tensor.shape or len(tensor.shape) != len(first.shape):
                raise ValueError(
                    f"cannot join {_described(tensor)} to {_described(first)}: they need the same number of "
                    f"dimensions, at least one."
                )
            if _removed(tensor.shape, dim) != _removed(first.shape, dim):
                raise ValueError(
                    f"cannot join {_described(tensor)} to {_described(first)} along dimension {dim}: sizes differ "
                    f"along another one."
                )
            pieces.extend(piece.moved(dim, length) for piece in tensor.to(dtype).pieces)
            length += tensor.shape[dim]
        return cls(_replaced(first.shape, dim, length), dtype, tuple(pieces))

    @classmethod
    def stack(cls, tensors: "Sequence[TensorPieces]", dim: int) -> "TensorPieces":
        """Join tensors along a new dimension, as `torch.stack`.

        Raises:
            IndexError: If there cannot be such a dimension.
            ValueError: If there are no tensors, or their shapes differ.
        """
        dtype = _common_dtype(tensors)
        first = tensors[0]
        dim = first._wrapped(dim, room_for=1)
        for tensor in tensors:
            if tensor.shape != first.shape:
                raise ValueError(f"cannot stack {_described(tensor)} on {_described(first)}: shapes differ.")
        pieces = tuple(
            piece.with_new_dim(dim).moved(dim, index)
            for index, tensor in enumerate(tensors)
            for piece in tensor.to(dtype).pieces
        )
        return cls(_inserted(first.shape, dim, len(tensors)), dtype, pieces)

    def narrow(self, dim: int, start: int, length: int) -> "TensorPieces":
        """Cut a range out along a dimension, as `torch.narrow`; a negative start counts from the end.

        Raises:
            IndexError: If there is no such dimension, or the start is not in it.
            ValueError: If the range is longer than what is there.
        """
        if not self.shape:
            raise IndexError(f"cannot cut {_described(self)}: it has no dimensions.")
        dim = self._wrapped(dim)
        size = self.shape[dim]
        first = start + size if start < 0 else start
        if not 0 <= first <= size:
            raise IndexError(f"cannot cut {_described(self)} at {start} along dimension {dim}, which has size {size}.")
        if length < 0 or first + length > size:
            raise ValueError(
                f"cannot cut {length} from {start} on out of {_described(self)} along dimension {dim}: there are "
                f"{size - first}."
            )
        if length == size:
            return self
        shape = _replaced(self.shape, dim, length)
        if 0 in shape:
            return TensorPieces(shape, self.dtype, ())
        cut = (piece.narrowed(dim, first, first + length) for piece in self.pieces)
        return TensorPieces(shape, self.dtype, tuple(piece for piece in cut if piece is not None))

    def select(self, dim: int, index: int) -> "TensorPieces":
        """Take one entry along a dimension, which goes, as `torch.select`.

        Raises:
            IndexError: If there is no such dimension or entry.
        """
        if not self.shape:
            raise IndexError(f"cannot take an entry of {_described(self)}: it has no dimensions.")
        dim = self._wrapped(dim)
        size = self.shape[dim]
        if not -size <= index < size:
            raise IndexError(f"{_described(self)} has no entry {index} along dimension {dim}.")
        return self.narrow(dim, index, 1).squeeze(dim)

    def transpose(self, first: int, second: int) -> "TensorPieces":
        """Exchange two dimensions, as `torch.transpose`.

        Raises:
            IndexError: If there is no such dimension.
        """
        first, second = self._wrapped(first), self._wrapped(second)
        if first == second:
            return self
        pieces = tuple(piece.transposed(first, second) for piece in self.pieces)
        return TensorPieces(_exchanged(self.shape, first, second), self.dtype, pieces)

    def unsqueeze(self, dim: int) -> "TensorPieces":
        """Insert a dimension of size 1, as `torch.unsqueeze`.

        Raises:
            IndexError: If there cannot be such a dimension.
        """
        dim = self._wrapped(dim, room_for=1)
        pieces = tuple(piece.with_new_dim(dim) for piece in self.pieces)
        return TensorPieces(_inserted(self.shape, dim, 1), self.dtype, pieces)

    def squeeze(self, dim: int | None = None) -> "TensorPieces":
        """Remove a dimension if it has the size 1, or all that have, as `torch.squeeze`.

        Raises:
            IndexError: If there is no such dimension.
        """
        if dim is None:
            result = self
            for position in reversed(range(len(self.shape))):
                result = result.squeeze(position)
            return result
        dim = self._wrapped(dim)
        if not self.shape or self.shape[dim] != 1:
            return self
        pieces = tuple(piece.without_dim(dim) for piece in self.pieces)
        return TensorPieces(_removed(self.shape, dim), self.dtype, pieces)

    def pad(self, dim: int, length: int) -> "TensorPieces":
        """Append zeros along a dimension until it has a length.

        Raises:
            IndexError: If there is no such dimension.
            ValueError: If it is longer already.
        """
        if not self.shape:
            raise IndexError(f"cannot pad {_described(self)}: it has no dimensions.")
        dim = self._wrapped(dim)
        size = self.shape[dim]
        if size > length:
            raise ValueError(f"cannot pad {_described(self)} to {length} along dimension {dim}: it is longer already.")
        shape = _replaced(self.shape, dim, length)
        if size == length or 0 in shape:
            return TensorPieces(shape, self.dtype, self.pieces)
        box = Box(_replaced((0,) * len(shape), dim, size), _replaced(shape, dim, length - size))
        zeros = Piece(box, None, Box((), ()), (None,) * len(shape))
        return TensorPieces(shape, self.dtype, (*self.pieces, zeros))

    def to(self, dtype: torch.dtype) -> "TensorPieces":
        """Convert to a dtype."""
        if dtype == self.dtype:
            return self
        pieces = tuple(dataclasses.replace(piece, dtypes=(*piece.dtypes, dtype)) for piece in self.pieces)
        return TensorPieces(self.shape, dtype, pieces)

    def within(self, box: Box) -> tuple[Piece, ...]:
        """Return the pieces of a box of the tensor, placed relative to its start.

        Raises:
            ValueError: If the box is not in the tensor.
        """
        if len(box.start) != len(self.shape) or any(
            start < 0 or size < 0 or start + size > available
            for start, size, available in zip(box.start, box.shape, self.shape, strict=True)
        ):
            raise ValueError(f"{box} is not in {_described(self)}.")
        found = list(self.pieces)
        for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
            if size != self.shape[dim]:
                cut = (piece.narrowed(dim, start, start + size) for piece in found)
                found = [piece for piece in cut if piece is not None]
        return tuple(found)

    def fill(self, target: torch.Tensor, box: Box, read: Callable[[str, Box], torch.Tensor]) -> None:
        """Copy a box of the tensor into memory, converting to its dtype and device. No communication.

        Args:
            target: Plain tensor of the box's shape, with any strides. Autograd does not see the change.
            box: Part of the tensor that the target is to hold.
            read: Returns a box of a source; a view is enough.

        Raises:
            ValueError: If the box is not in the tensor, the target has another shape, or `read` returns another one.
        """
        if tuple(target.shape) != box.shape:
            raise ValueError(f"cannot fill {tuple(target.shape)} with {box} of {_described(self)}.")
        # Outside autograd, which `torch.no_grad` would take longer for than the copy of a small tensor.
        target = target.detach()
        for piece in self.within(box):
            piece.copy_to(target, read)

    def _wrapped(self, dim: int, room_for: int = 0) -> int:
        """Return a dimension counted from the start. As in torch, a tensor without dimensions takes 0 and -1."""
        num_dims = max(len(self.shape) + room_for, 1)
        if not -num_dims <= dim < num_dims:
            raise IndexError(f"{_described(self)} has no dimension {dim}.")
        return dim % num_dims


def _described(tensor: TensorPieces) -> str:
    sources = {piece.source for piece in tensor.pieces if piece.source is not None}
    of_sources = f" made of {listed(sources)}" if sources else ""
    return f"a tensor of shape {tensor.shape}{of_sources}"


def _common_dtype(tensors: Sequence[TensorPieces]) -> torch.dtype:
    """Return the dtype that torch gives to joined tensors."""
    if not tensors:
        raise ValueError("there are no tensors to join.")
    common = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != common:
            try:
                common = torch.promote_types(common, tensor.dtype)
            except RuntimeError as error:
                raise ValueError(
                    f"cannot join {_described(tensor)} of {tensor.dtype} to others of {common}: {error}"
                ) from error
    return common


def _replaced(values: tuple[T, ...], position: int, value: T) -> tuple[T, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _inserted(values: tuple[T, ...], position: int, value: T) -> tuple[T, ...]:
    return (*values[:position], value, *values[position:])


def _removed(values: tuple[T, ...], position: int) -> tuple[T, ...]:
    return (*values[:position], *values[position + 1 :])


def _exchanged(values: tuple[T, ...], first: int, second: int) -> tuple[T, ...]:
    exchanged = list(values)
    exchanged[first], exchanged[second] = exchanged[second], exchanged[first]
    return tuple(exchanged)
