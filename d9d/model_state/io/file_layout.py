"""Decides where each tensor of an export will lie, before any is written: in which file, and at which byte.

It follows from names, shapes and dtypes alone, so it is the same on all ranks, however many there are.
"""

import dataclasses
import json
import math
from collections.abc import Iterable

import torch

from d9d.model_state.io.file_header import encoded_header, header_entry

__all__ = ["FileLayout", "StoredTensor", "lay_out"]

_MAX_HEADER_BYTES = 64 * 2**20
"""Readers refuse headers of more than 100 MB."""

_ENTRY_BYTES = 160
"""Of a header's entry, besides the name: more than any tensor of up to 20 dimensions takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """What its values take."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class FileLayout:
    """A file whose content is known but for the values.

    Attributes:
        header: Its first bytes, up to the data.
        tensors: What lies behind, by name.
        starts: Where each of them begins in the file.
    """

    header: bytes
    tensors: dict[str, StoredTensor]
    starts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors.values())


def lay_out(tensors: Iterable[StoredTensor], shard_bytes: int) -> list[FileLayout]:
    """Distribute tensors over files, one after the other.

    Args:
        tensors: In the order of the files; those that are made together follow each other.
        shard_bytes: Most tensor bytes in a file; a larger tensor gets a file for itself.
    """
    files: list[list[StoredTensor]] = []
    num_bytes = header_bytes = 0
    for tensor in tensors:
        entry_bytes = len(json.dumps(tensor.name)) + _ENTRY_BYTES
        # What has no values never begins a file.
        is_full = tensor.num_bytes > 0 and num_bytes > 0 and num_bytes + tensor.num_bytes > shard_bytes
        if not files or is_full or header_bytes + entry_bytes > _MAX_HEADER_BYTES:
            files.append([])
            num_bytes = header_bytes = 0
        files[-1].append(tensor)
        num_bytes += tensor.num_bytes
        header_bytes += entry_bytes
    return [_file_of(own) for own in files]


def _file_of(tensors: list[StoredTensor]) -> FileLayout:
    # The widest elements first: then each tensor starts at a multiple of its element size, and there are no gaps.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    entries: dict[str, dict[str, object]] = {}
    starts: dict[str, int] = {}
    position = 0
    for tensor in tensors:
        entries[tensor.name] = header_entry(tensor.dtype, tensor.shape, position)
        starts[tensor.name] = position
        position += tensor.num_bytes
    header = encoded_header(entries)
    starts = {name: len(header) + start for name, start in starts.items()}
    return FileLayout(header, {tensor.name: tensor for tensor in tensors}, starts)
