"""What each rank writes and reads of a checkpoint, with values that are no tensors as JSON."""

import dataclasses
import io
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from d9d.checkpoint.documents import document_key
from d9d.checkpoint.json_values import Value, from_json, to_json

__all__ = ["ValuesAsJsonLoadPlanner", "ValuesAsJsonSavePlanner"]


class ValuesAsJsonSavePlanner(DefaultSavePlanner):
    """Plans what each rank writes, and can take copies of it so that training goes on while it is written.

    Each part of a tensor and each value is written by one rank only, whoever holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] | None = None

    def copy_to_host(self, buffers: dict[MetadataIndex, torch.Tensor]) -> None:
        """Copy what this rank writes. Blocks until the copies are there.

        Args:
            buffers: Tensors of the copies before, which are reused where they fit; those of these copies afterwards.
                For tensors of an accelerator they are page-locked.
        """
        copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        kept: dict[MetadataIndex, torch.Tensor] = {}
        device: torch.device | None = None
        for item in self.plan.items:
            data = super().resolve_data(item)
            if isinstance(data, torch.Tensor):
                data = data.detach()
                device = data.device if data.device.type != "cpu" else device
                kept[item.index] = _copied(data, buffers.get(item.index))
                copies[item.index] = kept[item.index]
            else:
                copies[item.index] = data
        if device is not None:
            torch.get_device_module(device).current_stream(device).synchronize()
        buffers.clear()
        buffers.update(kept)
        self._copies = copies

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide which rank writes what. The first rank calls it."""
        return super().create_global_plan(_values_of_first(all_plans))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what an item writes: its copy if there are copies."""
        return super().resolve_data(write_item) if self._copies is None else self._copies[write_item.index]

    # Any: torch leaves open what states hold.
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002, ANN401  # as torch names it
        """Encode a value that is no tensor."""
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(to_json(cast(Value, object), write_item.index.fqn))
        return object


def _copied(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor to the host, with the strides that writing it directly would give the file."""
    is_on_host = tensor.device.type == "cpu"
    fits = buffer is not None and _layout(buffer) == _layout(tensor)
    if buffer is None or not fits:
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=not is_on_host)
    return buffer.copy_(tensor, non_blocking=not is_on_host)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return tensor.shape, tensor.dtype, tensor.stride()


def _values_of_first(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each document and each value that is no tensor to the first rank that has it.

    Parts of a document from several ranks would not be one value, and values of several ranks no state. Parts of DTensors
    stay where they are.
    """
    first: dict[str, int] = {}
    kept: list[SavePlan] = []
    for rank, plan in enumerate(plans):
        items: list[WriteItem] = []
        for item in plan.items:
            name = item.index.fqn
            key = document_key(name) or (name if item.type is WriteItemType.BYTE_IO else None)
            if key is None or item.type is WriteItemType.SHARD or first.setdefault(key, rank) == rank:
                items.append(item)
        kept.append(dataclasses.replace(plan, items=items))
    return kept


class ValuesAsJsonLoadPlanner(DefaultLoadPlanner):
    """Plans what each rank reads, and decodes values that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state that is being loaded."""
        name = read_item.dest_index.fqn
        _set_at(self.original_state_dict, self.mappings[name], from_json(value.getvalue(), name))


# Any: dictionaries and lists within one another.
def _set_at(state: Any, path: tuple[str | int, ...], value: object) -> None:  # noqa: ANN401
    for part in path[:-1]:
        state = state[_own_key(state, part)]
    state[_own_key(state, path[-1])] = value


def _own_key(state: Any, part: str | int) -> Any:  # noqa: ANN401
    """Return the key of a dictionary that PyTorch has turned into a string."""
    if isinstance(state, dict) and part not in state:
        return next(key for key in state if str(key) == part)
    return part
