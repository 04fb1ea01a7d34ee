"""Mappers that translate tensors themselves: all of them by name, and those of a single tensor."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from d9d.core.placement import like_parameter, local_tensor
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, check_shapes
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf_join import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperStackTensors,
    ModelStateMapperUnstackTensors,
)
from d9d.model_state.mapper.leaf_layout import (
    ModelStateMapperInterleavedToStacked,
    ModelStateMapperPadRows,
    ModelStateMapperRepeatHeads,
    ModelStateMapperSlice,
    ModelStateMapperStackedToInterleaved,
    ModelStateMapperUnrepeatHeads,
)
from d9d.model_state.mapper.leaf_values import ModelStateMapperCast, ModelStateMapperDrop, ModelStateMapperTie
from d9d.model_state.mapper.names import distinct
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
    "ModelStateMapperRepeatHeads",
    "ModelStateMapperSelectChildModules",
    "ModelStateMapperSlice",
    "ModelStateMapperSqueeze",
    "ModelStateMapperStackTensors",
    "ModelStateMapperStackedToInterleaved",
    "ModelStateMapperTie",
    "ModelStateMapperTranspose",
    "ModelStateMapperUnrepeatHeads",
    "ModelStateMapperUnsqueeze",
    "ModelStateMapperUnstackTensors",
]


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
