"""Mappers for what layouts differ in beyond torch's own operations: order of rows, padding, dtypes, ties."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import final

import torch
from torch.distributed.tensor import DTensor, Replicate

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, check_shapes
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.names import distinct
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = [
    "ModelStateMapperCast",
    "ModelStateMapperDrop",
    "ModelStateMapperInterleavedToStacked",
    "ModelStateMapperPadRows",
    "ModelStateMapperSlice",
    "ModelStateMapperStackedToInterleaved",
    "ModelStateMapperTie",
    "replicated",
]

_MAX_BLOCKS = 4096
"""Reading more blocks one by one takes longer than reading everything and taking it apart in memory."""


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
        self._source_name, self._target_name = source_name, target_name
        self._interleaving = _Interleaving(source_name, dim, tuple(group_sizes), num_groups)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._source_name], [self._target_name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the stacked tensor. All ranks of a `DTensor`'s mesh must call it: it is gathered."""
        rows = self._interleaving
        return {self._target_name: rows.arranged(group[self._source_name], rows.stacked_blocks())}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return the stacked tensor; None if it has thousands of blocks."""
        rows = self._interleaving
        traced = rows.traced(group[self._source_name], rows.stacked_blocks())
        return None if traced is None else {self._target_name: traced}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that interleaves the parts."""
        rows = self._interleaving
        return ModelStateMapperStackedToInterleaved(
            self._target_name, self._source_name, rows.dim, rows.group_sizes, rows.num_groups
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
        self._source_name, self._target_name = source_name, target_name
        self._interleaving = _Interleaving(source_name, dim, tuple(group_sizes), num_groups)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._source_name], [self._target_name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the interleaved tensor. All ranks of a `DTensor`'s mesh must call it: it is gathered."""
        rows = self._interleaving
        return {self._target_name: rows.arranged(group[self._source_name], rows.interleaved_blocks())}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return the interleaved tensor; None if it has thousands of blocks."""
        rows = self._interleaving
        traced = rows.traced(group[self._source_name], rows.interleaved_blocks())
        return None if traced is None else {self._target_name: traced}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that stacks the parts."""
        rows = self._interleaving
        return ModelStateMapperInterleavedToStacked(
            self._target_name, self._source_name, rows.dim, rows.group_sizes, rows.num_groups
        )


@final
class ModelStateMapperPadRows(ModelStateMapper):
    """Appends rows of zeros, as for a vocabulary that tensor parallelism does not divide; the inverse drops them."""

    def __init__(self, name: str, rows: int, *, source_rows: int | None = None) -> None:
        """Take the tensor and how many rows it is to have.

        Args:
            name: The tensor.
            rows: Size of its first dimension afterwards.
            source_rows: Size before, which the inverse restores; by default what this mapper has padded.
        """
        self._name, self._rows = name, rows
        self._source_rows = source_rows
        self._padded_rows: set[int] = set()

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
        self._padded_rows.add(tensor.shape[0])
        return {self._name: padded}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that drops the appended rows.

        Raises:
            NotImplementedError: If their number was not given, and this mapper has padded nothing yet or tensors of
                several sizes.
        """
        known = self._padded_rows if self._source_rows is None else {self._source_rows}
        if len(known) != 1:
            raise NotImplementedError(
                f"PadRows of '{self._name}' to {self._rows} does not know how many rows its inverse must keep: give it "
                f"`source_rows`."
            )
        return ModelStateMapperSlice(self._name, self._name, 0, 0, *known)


@final
class ModelStateMapperCast(ModelStateMapper):
    """Converts a tensor to a dtype."""

    def __init__(self, name: str, dtype: torch.dtype, *, source_dtype: torch.dtype | None = None) -> None:
        """Take the tensor and its dtypes.

        Args:
            name: The tensor.
            dtype: Its dtype afterwards.
            source_dtype: What the inverse converts back to; without it there is none.
        """
        self._name, self._dtype, self._source_dtype = name, dtype, source_dtype

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the converted tensor."""
        return {self._name: group[self._name].to(self._dtype)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the converted tensor."""
        return {self._name: group[self._name].to(self._dtype)}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that converts back.

        Raises:
            NotImplementedError: If the dtype before was not given.
        """
        if self._source_dtype is None:
            raise NotImplementedError(
                f"Cast of '{self._name}' to {self._dtype} does not know what it was before: give it `source_dtype`."
            )
        return ModelStateMapperCast(self._name, self._source_dtype, source_dtype=self._dtype)


@final
class ModelStateMapperTie(ModelStateMapper):
    """Makes one tensor of several names for it, under one or several other names.

    The first source must be there. Other ones may be missing; those that are there must be equal to it.
    """

    def __init__(self, source_names: list[str], target_names: list[str]) -> None:
        """Take the names before and after; the first source is the one that must be there.

        Raises:
            ValueError: If names are missing or there twice.
        """
        self._source_names = distinct("source_names", source_names)
        self._target_names = distinct("target_names", target_names)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensors."""
        return frozenset([StateGroup.of(self._source_names, self._target_names)])

    def optional_inputs(self) -> frozenset[str]:
        """Return all sources but the first."""
        return frozenset(self._source_names[1:])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the one tensor under all its names.

        Raises:
            ValueError: If sources differ.
        """
        first_name, *other_names = self._source_names
        first = group[first_name]
        for name in other_names:
            if name in group:
                _check_equal(first_name, first, name, group[name])
        return dict.fromkeys(self._target_names, first)

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return the one tensor under all its names; None if several must be read to see that they are equal."""
        first_name, *other_names = self._source_names
        if any(name in group for name in other_names):
            return None
        return dict.fromkeys(self._target_names, group[first_name])

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that writes all sources, whether or not they all were there."""
        return ModelStateMapperTie(list(self._target_names), list(self._source_names))


@final
class ModelStateMapperDrop(ModelStateMapper):
    """Leaves tensors out, whether or not they are there."""

    def __init__(self, names: Collection[str]) -> None:
        """Take the tensors.

        Raises:
            ValueError: If a name is there twice, or there are none.
        """
        self._names = distinct("names", names)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return one group for each tensor."""
        return frozenset(StateGroup.of([name], []) for name in self._names)

    def optional_inputs(self) -> frozenset[str]:
        """Return all the names."""
        return frozenset(self._names)

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return nothing."""
        del group
        return {}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return nothing."""
        del group
        return {}

    def inverse(self) -> ModelStateMapper:
        """Return a mapper of nothing: what was left out may be missing, so that it is not written."""
        return ModelStateMapperParallel([])


@dataclasses.dataclass(frozen=True, slots=True)
class _Interleaving:
    """The two orders of the rows of a fused tensor, as blocks of the other order: where each starts, and its length."""

    name: str
    dim: int
    group_sizes: tuple[int, ...]
    num_groups: int

    def __post_init__(self) -> None:
        if not self.group_sizes or min(self.group_sizes) < 1 or self.num_groups < 1:
            raise ValueError(
                f"'{self.name}': group_sizes and num_groups must be positive; got {list(self.group_sizes)} and "
                f"{self.num_groups}."
            )

    def stacked_blocks(self) -> list[tuple[int, int]]:
        group_length = sum(self.group_sizes)
        return [
            (index * group_length + start, size) for start, size in self._parts() for index in range(self.num_groups)
        ]

    def interleaved_blocks(self) -> list[tuple[int, int]]:
        return [
            (self.num_groups * start + index * size, size)
            for index in range(self.num_groups)
            for start, size in self._parts()
        ]

    def arranged(self, tensor: torch.Tensor, blocks: list[tuple[int, int]]) -> torch.Tensor:
        self._check(tensor.shape)
        # Cutting blocks out of shards would gather all of the tensor for each block.
        whole = replicated(tensor)
        return torch.cat([whole.narrow(self.dim, *block) for block in blocks], self.dim)

    def traced(self, tensor: TensorPieces, blocks: list[tuple[int, int]]) -> TensorPieces | None:
        self._check(tensor.shape)
        if len(blocks) * len(tensor.pieces) > _MAX_BLOCKS:
            return None
        return TensorPieces.cat([tensor.narrow(self.dim, *block) for block in blocks], self.dim)

    def _parts(self) -> list[tuple[int, int]]:
        """Return where each part starts in the first group, and its length there."""
        starts = accumulate(self.group_sizes, initial=0)
        return list(zip(starts, self.group_sizes, strict=False))

    def _check(self, shape: Sequence[int]) -> None:
        if not -len(shape) <= self.dim < len(shape):
            raise IndexError(f"'{self.name}' of shape {tuple(shape)} has no dimension {self.dim}.")
        expected = self.num_groups * sum(self.group_sizes)
        if shape[self.dim] != expected:
            raise ValueError(
                f"'{self.name}' has the size {shape[self.dim]} along dimension {self.dim} (shape {tuple(shape)}), but "
                f"{self.num_groups} groups of {' + '.join(map(str, self.group_sizes))} have {expected}."
            )


def _check_equal(first_name: str, first: torch.Tensor, name: str, other: torch.Tensor) -> None:
    if first.dtype != other.dtype or first.shape != other.shape:
        raise ValueError(
            f"'{first_name}' and '{name}' are tied, but one is {tuple(first.shape)} of {first.dtype}, the other "
            f"{tuple(other.shape)} of {other.dtype}."
        )
    if not torch.equal(first, other):
        raise ValueError(
            f"'{first_name}' and '{name}' are tied, but their values differ. If the model does not tie them, map each "
            f"to its own parameter; if it does, drop '{name}' to take '{first_name}'."
        )
