"""Mappers for what is stored of a tensor: its dtype, how often, and whether at all."""

from collections.abc import Collection, Mapping
from typing import final

import torch

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.names import distinct
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = ["ModelStateMapperCast", "ModelStateMapperDrop", "ModelStateMapperTie", "have_same_bits"]

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype are the same, so that copying either makes no difference.

    Equal NaNs are the same; 0.0 and -0.0 are not. All ranks of a `DTensor`'s mesh must call it, and get one answer. As
    `torch.equal`, it raises `RuntimeError` for tensors on the meta device, which have no values.
    """
    if first.is_complex():
        first, other = torch.view_as_real(first), torch.view_as_real(other)
    dtype = _INTEGER_OF_SIZE[first.element_size()]
    return torch.equal(first.view(dtype), other.view(dtype))


@final
class ModelStateMapperCast(ModelStateMapper):
    """Converts a tensor to a dtype, as `torch.Tensor.to`: values beyond its range become infinite, or NaN."""

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


def _check_equal(first_name: str, first: torch.Tensor, name: str, other: torch.Tensor) -> None:
    if first.dtype != other.dtype or first.shape != other.shape:
        raise ValueError(
            f"'{first_name}' and '{name}' are tied, but one is {tuple(first.shape)} of {first.dtype}, the other "
            f"{tuple(other.shape)} of {other.dtype}."
        )
    if not have_same_bits(first, other):
        raise ValueError(
            f"'{first_name}' and '{name}' are tied, but their values differ. If the model does not tie them, map each "
            f"to its own parameter; if it does, drop '{name}' to take '{first_name}'."
        )
