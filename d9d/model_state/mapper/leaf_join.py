"""Mappers that join tensors along a dimension, and those that take them apart."""

from collections.abc import Mapping, Sequence
from typing import final

import torch

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, check_shapes, operation_name
from d9d.model_state.mapper.leaf_layout import replicated
from d9d.model_state.mapper.names import capped, distinct, listed
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = [
    "ModelStateMapperChunkTensors",
    "ModelStateMapperConcatenateTensors",
    "ModelStateMapperStackTensors",
    "ModelStateMapperUnstackTensors",
]


@final
class ModelStateMapperConcatenateTensors(ModelStateMapper):
    """Joins tensors along a dimension, as `torch.cat`."""

    def __init__(
        self, source_names: list[str], target_name: str, dim: int, *, sizes: Sequence[int] | None = None
    ) -> None:
        """Take the tensors in their order.

        Args:
            source_names: The tensors to join.
            target_name: The joined one.
            dim: The dimension.
            sizes: Size of each source along the dimension. The inverse cuts there; without them there is none.

        Raises:
            ValueError: If names are missing or there twice, or the number of sizes differs from theirs.
        """
        self._source_names = distinct("source_names", source_names)
        self._target_name, self._dim = target_name, dim
        self._sizes = _checked_sizes(sizes, self._source_names)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensors."""
        return frozenset([StateGroup.of(self._source_names, [self._target_name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the joined tensor."""
        check_shapes(self, group)
        return {self._target_name: torch.cat([group[name] for name in self._source_names], self._dim)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the joined tensor."""
        tensors = [group[name] for name in self._source_names]
        joined = TensorPieces.cat(tensors, self._dim)
        sizes = tuple(tensor.shape[self._dim] if tensor.shape != (0,) else 0 for tensor in tensors)
        if self._sizes is not None and sizes != self._sizes:
            raise ValueError(
                f"'{self._target_name}' is joined along dimension {self._dim} from {listed(self._source_names)}, "
                f"which have the sizes {capped(sizes)}, not {capped(self._sizes)} as declared."
            )
        return {self._target_name: joined}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that cuts the joined tensor.

        Raises:
            NotImplementedError: If no sizes were given.
        """
        if self._sizes is None:
            raise NotImplementedError(
                f"ConcatenateTensors to '{self._target_name}' does not know where its inverse must cut: give it `sizes`, the "
                f"size of each of {listed(self._source_names)} along dimension {self._dim}."
            )
        return ModelStateMapperChunkTensors(self._target_name, list(self._source_names), self._dim, sizes=self._sizes)

    def explain(self) -> str:
        """Return the line of the group, with the sources in their order."""
        return f"{', '.join(self._source_names)} -> {self._target_name}  ({operation_name(self)})"


@final
class ModelStateMapperChunkTensors(ModelStateMapper):
    """Cuts a tensor along a dimension, into equal parts unless sizes are given."""

    def __init__(
        self, source_name: str, target_names: list[str], dim: int, *, sizes: Sequence[int] | None = None
    ) -> None:
        """Take the names of the parts in their order.

        Args:
            source_name: The tensor to cut.
            target_names: The parts.
            dim: The dimension.
            sizes: Size of each part along it.

        Raises:
            ValueError: If names are missing or there twice, or the number of sizes differs from theirs.
        """
        self._target_names = distinct("target_names", target_names)
        self._source_name, self._dim = source_name, dim
        self._sizes = _checked_sizes(sizes, self._target_names)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._source_name], self._target_names)])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts."""
        check_shapes(self, group)
        source = group[self._source_name]
        parts = source.split(self._sizes_of(source.shape), self._dim)
        return dict(zip(self._target_names, parts, strict=True))

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the parts."""
        source = group[self._source_name]
        source.narrow(self._dim, 0, 0)  # refuses what has no such dimension
        parts: dict[str, TensorPieces] = {}
        start = 0
        for name, size in zip(self._target_names, self._sizes_of(source.shape), strict=True):
            parts[name] = source.narrow(self._dim, start, size)
            start += size
        return parts

    def explain(self) -> str:
        """Return the line of the group, with the parts in their order."""
        return f"{self._source_name} -> {', '.join(self._target_names)}  ({operation_name(self)})"

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that joins the parts. Where no sizes were given, it has no inverse itself."""
        return ModelStateMapperConcatenateTensors(
            list(self._target_names), self._source_name, self._dim, sizes=self._sizes
        )

    def _sizes_of(self, shape: Sequence[int]) -> list[int]:
        size, num_parts = shape[self._dim], len(self._target_names)
        if self._sizes is not None:
            if sum(self._sizes) != size:
                raise ValueError(
                    f"'{self._source_name}' has the size {size} along dimension {self._dim} (shape {tuple(shape)}), but "
                    f"its parts {capped(self._sizes)} add up to {sum(self._sizes)}."
                )
            return list(self._sizes)
        if size % num_parts:
            raise ValueError(
                f"'{self._source_name}' has the size {size} along dimension {self._dim} (shape {tuple(shape)}), which "
                f"cannot be cut into {num_parts} equal parts. Give the `sizes` of the parts."
            )
        return [size // num_parts] * num_parts


@final
class ModelStateMapperStackTensors(ModelStateMapper):
    """Joins tensors of one shape along a new dimension, as `torch.stack`."""

    def __init__(self, source_names: list[str], target_name: str, dim: int) -> None:
        """Take the tensors in their order, the stacked one and the new dimension.

        Raises:
            ValueError: If names are missing or there twice.
        """
        self._source_names = distinct("source_names", source_names)
        self._target_name, self._dim = target_name, dim

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensors."""
        return frozenset([StateGroup.of(self._source_names, [self._target_name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the stacked tensor."""
        check_shapes(self, group)
        return {self._target_name: torch.stack([group[name] for name in self._source_names], self._dim)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the stacked tensor."""
        return {self._target_name: TensorPieces.stack([group[name] for name in self._source_names], self._dim)}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that takes the stack apart."""
        return ModelStateMapperUnstackTensors(self._target_name, list(self._source_names), self._dim)

    def explain(self) -> str:
        """Return the line of the group, with the sources in their order."""
        return f"{', '.join(self._source_names)} -> {self._target_name}  ({operation_name(self)})"


@final
class ModelStateMapperUnstackTensors(ModelStateMapper):
    """Takes all entries along a dimension, which goes, as `torch.unbind`."""

    def __init__(self, source_name: str, target_names: list[str], dim: int) -> None:
        """Take the stacked tensor, the names of its entries in their order, and the dimension.

        Raises:
            ValueError: If names are missing or there twice.
        """
        self._target_names = distinct("target_names", target_names)
        self._source_name, self._dim = source_name, dim

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._source_name], self._target_names)])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the entries. All ranks of a `DTensor`'s mesh must call it: it is gathered."""
        check_shapes(self, group)
        # torch does not take a DTensor apart along a sharded dimension.
        return dict(zip(self._target_names, replicated(group[self._source_name]).unbind(self._dim), strict=True))

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the entries."""
        source = group[self._source_name]
        source.narrow(self._dim, 0, 0)  # refuses what has no such dimension
        if source.shape[self._dim] != len(self._target_names):
            raise ValueError(
                f"'{self._source_name}' has {source.shape[self._dim]} entries along dimension {self._dim} (shape "
                f"{source.shape}), but there are {len(self._target_names)} names for them."
            )
        return {name: source.select(self._dim, index) for index, name in enumerate(self._target_names)}

    def explain(self) -> str:
        """Return the line of the group, with the entries in their order."""
        return f"{self._source_name} -> {', '.join(self._target_names)}  ({operation_name(self)})"

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that stacks the entries."""
        return ModelStateMapperStackTensors(list(self._target_names), self._source_name, self._dim)


def _checked_sizes(sizes: Sequence[int] | None, names: tuple[str, ...]) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if len(sizes) != len(names) or min(sizes) < 0:
        raise ValueError(f"sizes must be one number for each of {listed(names)}, none negative; got {capped(sizes)}.")
    return tuple(sizes)
