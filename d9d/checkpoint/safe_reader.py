"""Reads a checkpoint in PyTorch's distributed format without unpickling anything but tensors.

[Note: no code from files]
PyTorch pickles two things in a distributed checkpoint: what tensors there are (``.metadata``) and all values that are not
tensors. Unpickling runs whatever a file asks for. Here the first is read from a second file with the same content as JSON,
``.metadata`` is written for PyTorch's own tools only, and the second is JSON (`d9d.checkpoint.planners`). Tensors are read by
``torch.load`` with ``weights_only``, which no environment variable can change.
"""

import json
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

from d9d.checkpoint.json_values import DTYPES
from d9d.checkpoint.record import is_plain_name

__all__ = ["MANIFEST_NAME", "SafeReader", "manifest_of"]

MANIFEST_NAME = "tensors.json"
"""File that tells which part of which tensor is where."""

# Any in this module: JSON.


def manifest_of(metadata: Metadata) -> bytes:
    """Return the content of the manifest."""
    entries: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
            entries[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        else:
            entries[name] = None
    places = [
        [index.fqn, None if index.offset is None else list(index.offset), info.relative_path, info.offset, info.length]
        for index, info in cast(dict[MetadataIndex, _StorageInfo], metadata.storage_data).items()
    ]
    return json.dumps({"entries": entries, "places": places}, separators=(",", ":")).encode()


class SafeReader(filesystem.FileSystemReader):
    """Reads a checkpoint. See [Note: no code from files]."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which part of which tensor is where.

        Raises:
            ValueError: If the file is missing or holds anything else.
        """
        path = Path(self.path) / MANIFEST_NAME
        try:
            content = json.loads(path.read_bytes())
            return Metadata(
                state_dict_metadata={name: _entry(entry) for name, entry in content["entries"].items()},
                storage_data=dict(_place(Path(self.path), *place) for place in content["places"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path} does not tell what a checkpoint holds: {error}") from error


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
    folder: Path, name: str, offset: list[int] | None, file: str, start: int, length: int
) -> tuple[MetadataIndex, _StorageInfo]:
    if not is_plain_name(file) or (folder / file).is_symlink():
        raise ValueError(f"it names a file outside of the checkpoint, {file!r}")
    index = MetadataIndex(str(name), None if offset is None else torch.Size(offset))
    return index, _StorageInfo(relative_path=file, offset=int(start), length=int(length))
