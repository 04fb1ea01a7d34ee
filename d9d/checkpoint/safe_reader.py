"""Reads a checkpoint in PyTorch's distributed format without unpickling anything but tensors.

[Note: no code from files]
PyTorch pickles two things in a distributed checkpoint: what tensors there are (``.metadata``) and all values that are not
tensors. Unpickling runs whatever a file asks for. Here the first is read from a second file with the same content as JSON,
``.metadata`` is written for PyTorch's own tools only, and the second is JSON (`d9d.checkpoint.planners`). Tensors are read by
``torch.load`` with ``weights_only``, which no environment variable can change, or not parsed at all:

[Note: straight into memory]
A file holds the elements of a contiguous tensor one after the other. The manifest tells where they begin, so that those which
a rank wants are read from there into its own tensor, without a copy between. This is how a rank reads what it needs of rows;
other parts are cut out of a tensor that is loaded as a whole.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]  # what the reader of PyTorch takes (2.11 to 2.14)
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from d9d.checkpoint.direct_reads import MemoryRun, is_plain_memory, read_runs
from d9d.checkpoint.json_values import DTYPES
from d9d.checkpoint.record import is_plain_name

__all__ = ["MANIFEST_NAME", "SafeReader", "manifest_of"]

MANIFEST_NAME = "tensors.json"
"""File that tells which part of which tensor is where."""

# Any in this module: JSON.


def manifest_of(metadata: Metadata, starts: Mapping[MetadataIndex, int]) -> bytes:
    """Return the content of the manifest.

    Args:
        metadata: Which part of which tensor is where.
        starts: Where the elements of contiguous tensors begin. See [Note: straight into memory].
    """
    entries: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
            entries[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        else:
            entries[name] = None
    places = [
        [
            index.fqn,
            None if index.offset is None else list(index.offset),
            info.relative_path,
            info.offset,
            info.length,
            starts.get(index),
        ]
        for index, info in cast(dict[MetadataIndex, _StorageInfo], metadata.storage_data).items()
    ]
    return json.dumps({"entries": entries, "places": places}, separators=(",", ":")).encode()


@dataclasses.dataclass
class _Place(_StorageInfo):
    """Where a part of a tensor, or a value, is in a file."""

    start: int | None = None
    """Offset in the file of its first element. See [Note: straight into memory]."""


class SafeReader(filesystem.FileSystemReader):
    """Reads a checkpoint. See [Note: no code from files]."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which part of which tensor is where.

        Raises:
            ValueError: If the file is missing or holds anything else.
        """
        path = self._folder / MANIFEST_NAME
        try:
            content = json.loads(path.read_bytes())
            for file in {file for _, _, file, *_ in content["places"]}:  # each once: a file holds many tensors
                if not is_plain_name(file) or (self._folder / file).is_symlink():
                    raise ValueError(f"it names a file outside of the checkpoint, {file!r}")
            return Metadata(
                state_dict_metadata={name: _entry(entry) for name, entry in content["entries"].items()},
                storage_data=dict(_place(*place) for place in content["places"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path} does not tell what a checkpoint holds: {error}") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take what `read_metadata` has returned."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._saved_shapes = {
            MetadataIndex(name, chunk.offsets): (chunk.sizes, entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for. Blocks; several threads read.

        Raises:
            ValueError: If a file ends before a part of a tensor does.
        """
        others: list[ReadItem] = []
        by_file: dict[str, list[MemoryRun]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            run = self._run(item, place, planner)
            if run is None:
                others.append(item)
            else:
                by_file.setdefault(place.relative_path, []).append(run)
        for name, runs in by_file.items():
            read_runs(self._folder / name, runs)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _run(self, item: ReadItem, place: _Place, planner: LoadPlanner) -> MemoryRun | None:
        """Return what to read straight into memory, if that is possible."""
        if item.type is not LoadItemType.TENSOR or place.start is None:
            return None
        shape, dtype = self._saved_shapes[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        are_rows = shape[1:] == item.lengths[1:]
        if not (are_rows and is_plain_memory(target) and target.dtype == dtype and target.shape == item.lengths):
            return None
        first_row = item.storage_offsets[0] if shape else 0
        return MemoryRun(start=place.start + first_row * shape[1:].numel() * dtype.itemsize, target=target)


def _entry(entry: dict[str, Any] | None) -> STORAGE_TYPES:
    if entry is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
        size=torch.Size(entry["shape"]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in entry["chunks"]
        ],
    )


def _place(
    name: str, offset: list[int] | None, file: str, begin: int, length: int, start: int | None
) -> tuple[MetadataIndex, _Place]:
    index = MetadataIndex(str(name), None if offset is None else torch.Size(offset))
    if start is not None and not 0 <= begin <= start <= begin + length:
        raise ValueError(f"the elements of {name} begin outside of its part of {file}")
    return index, _Place(
        relative_path=file, offset=int(begin), length=int(length), start=None if start is None else int(start)
    )
