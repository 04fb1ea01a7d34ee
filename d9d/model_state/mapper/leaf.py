"""Mappers that translate tensors themselves."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from d9d.core.placement import like_parameter, local_tensor
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, check_shapes, operation_name
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf_layout import (
    ModelStateMapperCast,
    ModelStateMapperDrop,
    ModelStateMapperInterleavedToStacked,
    ModelStateMapperPadRows,
    ModelStateMapperSlice,
    ModelStateMapperStackedToInterleaved,
    ModelStateMapperTie,
    replicated,
)
from d9d.model_state.mapper.names import distinct, listed
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = [
    "ModelStateMapperCast",
    "ModelStateMapperChunkTensors",
    "ModelStateMapperConcatenateTensors",
    "ModelStateMapperDistribute",
    "ModelStateMapperDrop",
    "ModelStateMapperGatherFullTensor",
    "ModelStateMapperIdentity",
    "ModelStateMapperInterleavedToStacked",
    "ModelStateMapperPadRows",
    "ModelStateMapperRename",
    "ModelStateMapperSelectChildModules",
    "ModelStateMapperSlice",
    "ModelStateMapperSqueeze",
    "ModelStateMapperStackTensors",
    "ModelStateMapperStackedToInterleaved",
    "ModelStateMapperTie",
    "ModelStateMapperTranspose",
    "ModelStateMapperUnsqueeze",
    "ModelStateMapperUnstackTensors",
]

_MAX_SIZES_SHOWN = 10


@final
class ModelStateMapperIdentity(ModelStateMapper):
    """Passes one tensor on under its own name."""

    def __init__(self, name: str) -> None:
        """Take the name of the tensor."""
        self._name = name

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensor."""
        return {self._name: group[self._name]}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the tensor."""
        return {self._name: group[self._name]}

    def inverse(self) -> ModelStateMapper:
        """Return the same."""
        return self


@final
class ModelStateMapperRename(ModelStateMapper):
    """Gives one tensor another name."""

    def __init__(self, name_from: str, name_to: str) -> None:
        """Take the names before and after."""
        self._name_from, self._name_to = name_from, name_to

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name_from], [self._name_to])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensor."""
        return {self._name_to: group[self._name_from]}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the tensor."""
        return {self._name_to: group[self._name_from]}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that gives the old name back."""
        return ModelStateMapperRename(self._name_to, self._name_from)


@final
class ModelStateMapperSelectChildModules(ModelStateMapper):
    """Takes tensors out of a parent module: ``parent.base`` becomes ``base``, each in its own group."""

    def __init__(self, base_names: list[str], parent_name: str) -> None:
        """Take the names within the parent.

        Args:
            base_names: Names of tensors, relative to the parent.
            parent_name: Name of the parent, without the dot at its end.
        """
        self._base_by_source = {f"{parent_name}.{base}": base for base in distinct("base_names", base_names)}

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return one group for each tensor."""
        return frozenset(StateGroup.of([source], [base]) for source, base in self._base_by_source.items())

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors under their names within the parent."""
        return {self._base_by_source[name]: tensor for name, tensor in group.items()}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the tensors under their names within the parent."""
        return {self._base_by_source[name]: tensor for name, tensor in group.items()}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that puts the tensors under the parent."""
        renamed = [ModelStateMapperRename(base, source) for source, base in self._base_by_source.items()]
        return ModelStateMapperParallel(renamed)


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
            sizes: Size of each source along the dimension. The inverse cuts there. By default it cuts where this mapper
                has joined tensors, so there is no inverse before it has.

        Raises:
            ValueError: If names are missing or there twice, or the number of sizes differs from theirs.
        """
        self._source_names = distinct("source_names", source_names)
        self._target_name, self._dim = target_name, dim
        self._sizes = _checked_sizes(sizes, self._source_names)
        self._joined_sizes: set[tuple[int, ...]] = set()

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
                f"which have the sizes {_shown(sizes)}, not {_shown(self._sizes)} as declared."
            )
        self._joined_sizes.add(sizes)
        return {self._target_name: joined}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that cuts the joined tensor.

        Raises:
            NotImplementedError: If no sizes were given, and no tensors were joined or those of several sizes.
        """
        known = self._joined_sizes if self._sizes is None else {self._sizes}
        if len(known) != 1:
            joined = "tensors of several sizes, as it is used more than once" if known else "no tensors yet"
            raise NotImplementedError(
                f"ConcatenateTensors to '{self._target_name}' has joined {joined}: give it `sizes`, so that its inverse "
                f"knows where to cut."
            )
        [sizes] = known
        return ModelStateMapperChunkTensors(self._target_name, list(self._source_names), self._dim, sizes=sizes)

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
        """Return the mapper that joins the parts."""
        return ModelStateMapperConcatenateTensors(
            list(self._target_names), self._source_name, self._dim, sizes=self._sizes
        )

    def _sizes_of(self, shape: Sequence[int]) -> list[int]:
        size, num_parts = shape[self._dim], len(self._target_names)
        if self._sizes is not None:
            if sum(self._sizes) != size:
                raise ValueError(
                    f"'{self._source_name}' has the size {size} along dimension {self._dim} (shape {tuple(shape)}), but "
                    f"its parts {_shown(self._sizes)} add up to {sum(self._sizes)}."
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


@final
class ModelStateMapperTranspose(ModelStateMapper):
    """Exchanges two dimensions of a tensor, as `torch.transpose`."""

    def __init__(self, name: str, dims: tuple[int, int]) -> None:
        """Take the tensor and the dimensions."""
        self._name = name
        self._first, self._second = dims

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a view of the tensor."""
        check_shapes(self, group)
        return {self._name: group[self._name].transpose(self._first, self._second)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the transposed tensor."""
        return {self._name: group[self._name].transpose(self._first, self._second)}

    def inverse(self) -> ModelStateMapper:
        """Return the same."""
        return self


@final
class ModelStateMapperSqueeze(ModelStateMapper):
    """Removes a dimension of size 1, or all of them, as `torch.squeeze`."""

    def __init__(self, name: str, dim: int | None = None) -> None:
        """Take the tensor and the dimension; None for all."""
        self._name, self._dim = name, dim

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a view of the tensor; as in torch, other sizes than 1 stay."""
        check_shapes(self, group)
        tensor = group[self._name]
        return {self._name: tensor.squeeze() if self._dim is None else tensor.squeeze(self._dim)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the squeezed tensor."""
        return {self._name: group[self._name].squeeze(self._dim)}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that inserts the dimension.

        Raises:
            NotImplementedError: If no dimension was named.
        """
        if self._dim is None:
            raise NotImplementedError(
                f"Squeeze of '{self._name}' removes all dimensions of size 1, so that its inverse cannot know where they "
                f"were: give it a `dim`."
            )
        return ModelStateMapperUnsqueeze(self._name, self._dim)


@final
class ModelStateMapperUnsqueeze(ModelStateMapper):
    """Inserts a dimension of size 1, as `torch.unsqueeze`."""

    def __init__(self, name: str, dim: int) -> None:
        """Take the tensor and where the dimension goes."""
        self._name, self._dim = name, dim

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a view of the tensor."""
        check_shapes(self, group)
        return {self._name: group[self._name].unsqueeze(self._dim)}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the tensor with its new dimension."""
        return {self._name: group[self._name].unsqueeze(self._dim)}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that removes the dimension."""
        return ModelStateMapperSqueeze(self._name, self._dim)


@final
class ModelStateMapperDistribute(ModelStateMapper):
    """Makes a `DTensor` of a tensor that every rank holds in full. No communication."""

    def __init__(self, name: str, device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None) -> None:
        """Take the tensor and its layout.

        Args:
            name: The tensor.
            device_mesh: The mesh; None leaves the tensor as it is.
            placements: One for each dimension of the mesh; None to replicate.
        """
        self._name, self._device_mesh, self._placements = name, device_mesh, placements

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the distributed tensor, which does not keep the memory of the full one if it is smaller."""
        tensor = group[self._name]
        if self._device_mesh is None:
            return {self._name: tensor}
        # Without a source rank each keeps its own part, where torch would broadcast.
        distributed = distribute_tensor(tensor, self._device_mesh, self._placements, src_data_rank=None)
        local = local_tensor(distributed)
        if local.untyped_storage().nbytes() > local.nbytes:
            distributed = like_parameter(local.clone(), distributed)
        return {self._name: distributed}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the tensor: pieces describe all of it, wherever its shards are."""
        return {self._name: group[self._name]}

    def inverse(self) -> ModelStateMapper:
        """Return the mapper that gathers the tensor."""
        return ModelStateMapperGatherFullTensor(self._name)


@final
class ModelStateMapperGatherFullTensor(ModelStateMapper):
    """Gathers a `DTensor`; a plain tensor stays as it is. All ranks of the tensor's mesh must apply it."""

    def __init__(self, name: str) -> None:
        """Take the tensor."""
        self._name = name

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the one group of the tensor."""
        return frozenset([StateGroup.of([self._name], [self._name])])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the full tensor. Blocks until the shards are here."""
        tensor = group[self._name]
        return {self._name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor}

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces]:
        """Return the tensor: pieces describe all of it, wherever its shards are."""
        return {self._name: group[self._name]}

    def inverse(self) -> ModelStateMapper:
        """Return a mapper that leaves the tensor in full: who loads it knows the layout."""
        return ModelStateMapperIdentity(self._name)


def _checked_sizes(sizes: Sequence[int] | None, names: tuple[str, ...]) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if len(sizes) != len(names) or min(sizes) < 0:
        raise ValueError(f"sizes must be one number for each of {listed(names)}, none negative; got {_shown(sizes)}.")
    return tuple(sizes)


def _shown(sizes: Sequence[int]) -> str:
    ordered = [str(size) for size in sizes[:_MAX_SIZES_SHOWN]]
    return ", ".join(ordered if len(sizes) <= _MAX_SIZES_SHOWN else [*ordered, f"and {len(sizes) - len(ordered)} more"])
