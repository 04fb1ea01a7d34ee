"""Mappers for rows: some of them, in another order, repeated, or padded."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import final

import torch
from torch.distributed.tensor import DTensor, Replicate

from d9d.core.placement import local_tensor
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, check_shapes
from d9d.model_state.mapper.leaf_values import have_same_bits
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = [
    "ModelStateMapperInterleavedToStacked",
    "ModelStateMapperPadRows",
    "ModelStateMapperRepeatHeads",
    "ModelStateMapperSlice",
    "ModelStateMapperStackedToInterleaved",
    "ModelStateMapperUnrepeatHeads",
    "replicated",
]

_MAX_BLOCKS = 4096
"""Reading more blocks one by one takes longer than reading everything and taking it apart in memory."""

_Block = tuple[int, int]
"""Where rows start along a dimension, and how many there are."""


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which every rank holds everything; all ranks of a `DTensor`'s mesh must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


@final
class ModelStateMapperSlice(ModelStateMapper):
    """Cuts a range out of a tensor along a dimension, as `torch.narrow`. The rest is not used."""

    def __init__(self, source_name: str, target_name: str, dim: int, start: int, length: int) -> None:
        """Take the tensor and the range."""
        self._source_name, self._target_name = source_name, target_name
        self._dim, self._start, self._length = dim, start, length

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._source_name], [self._target_name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a view of the range."""
        check_shapes(self, group)
        return {self._target_name: group[self._source_name].narrow(self._dim, self._start, self._length)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the range."""
        return {self._target_name: group[self._source_name].narrow(self._dim, self._start, self._length)}


@final
class ModelStateMapperInterleavedToStacked(ModelStateMapper):
    """Sorts the rows of a fused tensor: from group by group, each with a block of every part, to part by part.

    Shapes:
        Along the dimension, both tensors have ``num_groups * sum(group_sizes)`` rows.

    Example:
        Queries, keys and values fused under grouped-query attention, for each key-value head the queries that use it::

            ModelStateMapperInterleavedToStacked(
                "attn.qkv.weight", "attn.qkv.weight", dim=0,
                group_sizes=[heads // kv_heads * head_dim, head_dim, head_dim], num_groups=kv_heads,
            )

        Gate and up projections that alternate row by row: ``group_sizes=[1, 1], num_groups=hidden``. To get the parts as
        tensors of their own, let `ModelStateMapperChunkTensors` follow, with the sizes ``num_groups * group_size``.
    """

    def __init__(
        self, source_name: str, target_name: str, dim: int, group_sizes: Sequence[int], num_groups: int
    ) -> None:
        """Take the tensor and how it is interleaved.

        Args:
            source_name: The interleaved tensor.
            target_name: The stacked one; may be the same name.
            dim: The dimension that the parts are fused along.
            group_sizes: How many rows of each part a group has.
            num_groups: Number of groups.

        Raises:
            ValueError: If a size or the number of groups is not positive.
        """
        self._rows = _Interleaving(source_name, target_name, dim, tuple(group_sizes), num_groups)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return self._rows.groups

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the stacked tensor. All ranks of a `DTensor`'s mesh must call it: it is gathered."""
        return self._rows.arranged(group, self._rows.stacked_blocks())

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return the stacked tensor; None if it has thousands of blocks."""
        return self._rows.traced(group, self._rows.stacked_blocks())

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that interleaves the parts."""
        rows = self._rows
        return ModelStateMapperStackedToInterleaved(
            rows.target_name, rows.source_name, rows.dim, rows.group_sizes, rows.num_groups
        )


@final
class ModelStateMapperStackedToInterleaved(ModelStateMapper):
    """Sorts the rows of a fused tensor: from part by part to group by group, each with a block of every part.

    The inverse of `ModelStateMapperInterleavedToStacked`, which see.
    """

    def __init__(
        self, source_name: str, target_name: str, dim: int, group_sizes: Sequence[int], num_groups: int
    ) -> None:
        """Take the tensor and how it is to be interleaved.

        Args:
            source_name: The stacked tensor.
            target_name: The interleaved one; may be the same name.
            dim: The dimension that the parts are fused along.
            group_sizes: How many rows of each part a group has.
            num_groups: Number of groups.

        Raises:
            ValueError: If a size or the number of groups is not positive.
        """
        self._rows = _Interleaving(source_name, target_name, dim, tuple(group_sizes), num_groups)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return self._rows.groups

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the interleaved tensor. All ranks of a `DTensor`'s mesh must call it: it is gathered."""
        return self._rows.arranged(group, self._rows.interleaved_blocks())

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return the interleaved tensor; None if it has thousands of blocks."""
        return self._rows.traced(group, self._rows.interleaved_blocks())

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that stacks the parts."""
        rows = self._rows
        return ModelStateMapperInterleavedToStacked(
            rows.target_name, rows.source_name, rows.dim, rows.group_sizes, rows.num_groups
        )


@final
class ModelStateMapperPadRows(ModelStateMapper):
    """Appends rows of zeros, as for a vocabulary that tensor parallelism does not divide; the inverse drops them."""

    def __init__(self, name: str, rows: int, *, source_rows: int | None = None) -> None:
        """Take the tensor and how many rows it is to have.

        Args:
            name: The tensor.
            rows: Size of its first dimension afterwards.
            source_rows: Size before, which the inverse restores; without it there is none.
        """
        self._name, self._rows = name, rows
        self._source_rows = source_rows

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the padded tensor."""
        check_shapes(self, group)
        tensor = group[self._name]
        if tensor.shape[0] == self._rows:
            return {self._name: tensor}
        zeros = tensor.new_zeros((self._rows - tensor.shape[0], *tensor.shape[1:]))
        return {self._name: torch.cat([tensor, zeros])}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the padded tensor."""
        tensor = group[self._name]
        padded = tensor.pad(0, self._rows)
        if self._source_rows is not None and tensor.shape[0] != self._source_rows:
            raise ValueError(f"'{self._name}' has {tensor.shape[0]} rows, not {self._source_rows} as declared.")
        return {self._name: padded}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that drops the appended rows.

        Raises:
            NotImplementedError: If the number of rows before was not given.
        """
        if self._source_rows is None:
            raise NotImplementedError(
                f"PadRows of '{self._name}' to {self._rows} does not know how many rows its inverse must keep: give it "
                f"`source_rows`."
            )
        return ModelStateMapperSlice(self._name, self._name, 0, 0, self._source_rows)


@final
class ModelStateMapperRepeatHeads(ModelStateMapper):
    """Repeats each head of a tensor, as for key-value heads that are fewer than the ranks of tensor parallelism.

    Copies stand next to each other, as of `torch.repeat_interleave`: heads 0 and 1 become 0, 0, 1, 1.

    Shapes:
        Along the dimension, the source has ``num_heads * head_size`` rows, the target ``repeats`` times as many.
    """

    def __init__(self, source_name: str, target_name: str, dim: int, num_heads: int, repeats: int) -> None:
        """Take the tensor and how often its heads are to be there.

        Args:
            source_name: The tensor with each head once.
            target_name: The one with all copies; may be the same name.
            dim: The dimension that the heads are side by side along.
            num_heads: Number of different heads.
            repeats: How often each is to be there.

        Raises:
            ValueError: If a number is not positive.
        """
        self._heads = _Repetition(source_name, target_name, dim, num_heads, repeats)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return self._heads.groups

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensor with all copies. All ranks of a `DTensor`'s mesh must call it: it is gathered."""
        heads = self._heads
        source = group[heads.source_name]
        return {heads.target_name: _arranged(source, heads.dim, heads.repeated_blocks(source.shape))}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return the tensor with all copies; None if there are thousands."""
        heads = self._heads
        source = group[heads.source_name]
        traced = _traced(source, heads.dim, heads.repeated_blocks(source.shape))
        return None if traced is None else {heads.target_name: traced}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that takes one copy of each head, and refuses copies that differ."""
        heads = self._heads
        return ModelStateMapperUnrepeatHeads(
            heads.target_name, heads.source_name, heads.dim, heads.num_heads, heads.repeats
        )


@final
class ModelStateMapperUnrepeatHeads(ModelStateMapper):
    """Takes the first copy of each head of a tensor. The others must be equal to it.

    The inverse of `ModelStateMapperRepeatHeads`, which see.
    """

    def __init__(self, source_name: str, target_name: str, dim: int, num_heads: int, repeats: int) -> None:
        """Take the tensor and how often its heads are there.

        Args:
            source_name: The tensor with all copies.
            target_name: The one with each head once; may be the same name.
            dim: The dimension that the heads are side by side along.
            num_heads: Number of different heads.
            repeats: How often each is there.

        Raises:
            ValueError: If a number is not positive.
        """
        self._heads = _Repetition(source_name, target_name, dim, num_heads, repeats)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return self._heads.groups

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return each head once. All ranks of a `DTensor`'s mesh must call it: it is gathered.

        Raises:
            ValueError: If copies of a head differ.
        """
        heads = self._heads
        source = replicated(group[heads.source_name])
        blocks = heads.first_blocks(source.shape)
        self._check_copies(local_tensor(source), blocks)
        return {heads.target_name: _arranged(source, heads.dim, blocks)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return each head once if there are no copies; None if there are, which must be read to see that they are equal."""
        heads = self._heads
        source = group[heads.source_name]
        traced = _traced(source, heads.dim, heads.first_blocks(source.shape))
        return {heads.target_name: traced} if heads.repeats == 1 and traced is not None else None

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that repeats the heads."""
        heads = self._heads
        return ModelStateMapperRepeatHeads(
            heads.target_name, heads.source_name, heads.dim, heads.num_heads, heads.repeats
        )

    def _check_copies(self, tensor: torch.Tensor, blocks: list[_Block]) -> None:
        heads = self._heads
        for head, (start, size) in enumerate(blocks):
            first = tensor.narrow(heads.dim, start, size)
            for copy in range(1, heads.repeats):
                if not have_same_bits(first, tensor.narrow(heads.dim, start + copy * size, size)):
                    raise ValueError(
                        f"'{heads.source_name}' has copy {copy} of head {head} that differs from copy 0, along dimension "
                        f"{heads.dim}. Copies that were trained one by one are heads of their own: export all "
                        f"{heads.num_heads * heads.repeats} of them, or keep copies equal in training."
                    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Interleaving:
    """A fused tensor that one mapper reads and another order of its rows that it makes; what both directions share."""

    source_name: str
    target_name: str
    dim: int
    group_sizes: tuple[int, ...]
    num_groups: int

    def __post_init__(self) -> None:
        if not self.group_sizes or min(self.group_sizes) < 1 or self.num_groups < 1:
            raise ValueError(
                f"'{self.source_name}': group_sizes and num_groups must be positive; got {list(self.group_sizes)} and "
                f"{self.num_groups}."
            )

    @property
    def groups(self) -> frozenset[StateGroup]:
        return frozenset([StateGroup.of([self.source_name], [self.target_name])])

    def stacked_blocks(self) -> list[_Block]:
        group_length = sum(self.group_sizes)
        return [
            (index * group_length + start, size) for start, size in self._parts() for index in range(self.num_groups)
        ]

    def interleaved_blocks(self) -> list[_Block]:
        return [
            (self.num_groups * start + index * size, size)
            for index in range(self.num_groups)
            for start, size in self._parts()
        ]

    def arranged(self, group: Mapping[str, torch.Tensor], blocks: list[_Block]) -> dict[str, torch.Tensor]:
        source = group[self.source_name]
        self._check(source.shape)
        return {self.target_name: _arranged(source, self.dim, blocks)}

    def traced(self, group: Mapping[str, TensorPieces], blocks: list[_Block]) -> dict[str, TensorPieces] | None:
        source = group[self.source_name]
        self._check(source.shape)
        traced = _traced(source, self.dim, blocks)
        return None if traced is None else {self.target_name: traced}

    def _parts(self) -> list[_Block]:
        """Return where each part starts in the first group, and its length there."""
        starts = accumulate(self.group_sizes, initial=0)
        return list(zip(starts, self.group_sizes, strict=False))

    def _check(self, shape: Sequence[int]) -> None:
        size = _size_along(self.source_name, shape, self.dim)
        expected = self.num_groups * sum(self.group_sizes)
        if size != expected:
            raise ValueError(
                f"'{self.source_name}' has the size {size} along dimension {self.dim} (shape {tuple(shape)}), but "
                f"{self.num_groups} groups of {' + '.join(map(str, self.group_sizes))} have {expected}."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Repetition:
    """Heads, and the same heads several times each; what both directions share."""

    source_name: str
    target_name: str
    dim: int
    num_heads: int
    repeats: int

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.repeats < 1:
            raise ValueError(
                f"'{self.source_name}': num_heads ({self.num_heads}) and repeats ({self.repeats}) must be positive."
            )

    @property
    def groups(self) -> frozenset[StateGroup]:
        return frozenset([StateGroup.of([self.source_name], [self.target_name])])

    def repeated_blocks(self, shape: Sequence[int]) -> list[_Block]:
        size = self.head_size(shape, self.num_heads)
        return [(head * size, size) for head in range(self.num_heads) for _ in range(self.repeats)]

    def first_blocks(self, shape: Sequence[int]) -> list[_Block]:
        size = self.head_size(shape, self.num_heads * self.repeats)
        return [(head * self.repeats * size, size) for head in range(self.num_heads)]

    def head_size(self, shape: Sequence[int], num_heads: int) -> int:
        size = _size_along(self.source_name, shape, self.dim)
        if size % num_heads:
            raise ValueError(
                f"'{self.source_name}' has the size {size} along dimension {self.dim} (shape {tuple(shape)}), which is not "
                f"a multiple of {num_heads} heads."
            )
        return size // num_heads


def _size_along(name: str, shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"'{name}' of shape {tuple(shape)} has no dimension {dim}.")
    return shape[dim]


def _arranged(tensor: torch.Tensor, dim: int, blocks: list[_Block]) -> torch.Tensor:
    # Cutting blocks out of shards would gather all of the tensor for each block.
    whole = replicated(tensor)
    return torch.cat([whole.narrow(dim, *block) for block in blocks], dim)


def _traced(tensor: TensorPieces, dim: int, blocks: list[_Block]) -> TensorPieces | None:
    if len(blocks) * len(tensor.pieces) > _MAX_BLOCKS:
        return None
    return TensorPieces.cat([tensor.narrow(dim, *block) for block in blocks], dim)
