"""Models, mappers and sources that tests of loading share."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from d9d.model_state.io.load import load_model_state
from d9d.model_state.io.source import ModelStateSource, TensorInfo
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperIdentity
from d9d.model_state.mapper.pieces import Box


def numbered(shape: Sequence[int], first: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a tensor in which every element is another integer."""
    return torch.arange(first, first + math.prod(shape)).view(tuple(shape)).to(dtype)


def write(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a model state of one file; rank 0 does it for all."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(dict(tensors), directory / "model.safetensors")
    if dist.is_initialized():
        dist.barrier()
    return directory


def load(directory: Path, mapper: ModelStateMapper, model: nn.Module, **options: object) -> None:
    load_model_state(directory, mapper, "cpu", model, show_progress=False, **options)


class Tensors(nn.Module):
    """Parameters, and buffers of dtypes that have no gradient, by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


class CountingSource(ModelStateSource):
    """Counts the bytes that are asked for."""

    def __init__(self, source: ModelStateSource) -> None:
        self.source = source
        self.num_bytes = 0

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.source.tensors

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        values = self.source.read(name, box)
        self.num_bytes += values.nbytes
        return values

    def close(self) -> None:
        self.source.close()


class Untraced(ModelStateMapper):
    """A mapper that must be run to know what it does."""

    def __init__(self, inputs: list[str], outputs: list[str], function: Callable[..., Sequence[torch.Tensor]]) -> None:
        self.inputs, self.outputs, self.function = inputs, outputs, function

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset([StateGroup(frozenset(self.inputs), frozenset(self.outputs))])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self.outputs, self.function(*(group[name] for name in self.inputs)), strict=True))


def identity(*names: str) -> ModelStateMapper:
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])
