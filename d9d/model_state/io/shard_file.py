"""Writes one safetensors file as a stream: each tensor goes to disk when it comes, and none is kept.

[Note: a header before the data]
The header of the format comes first, and says where each tensor is, which is known last. So room is left for it, and what
it does not need is filled with spaces, which the format allows. What does not fit goes to another file, see
`ShardFile.has_room_for`.

[Note: aligned tensors without holes]
The format allows no gaps, but tensors should start at a multiple of their element size, since files are mapped and read
in place. A tensor of a multiple of 8 bytes leaves the next one aligned. A smaller odd one waits in memory for the end of
the file, where those that wait follow each other by falling element size. A large one is written at once, after the
waiting ones with elements as wide or wider; from then on only elements as narrow as its own are aligned, and wider ones
go to another file.
"""

import json
import os
from pathlib import Path
from typing import Any, final

import torch

from d9d.model_state.io.durable import naming_path
from d9d.model_state.io.file_header import ALIGNMENT, DTYPE_NAMES, check_name, encoded_header, header_entry
from d9d.model_state.io.stored_values import (
    as_bytes,
    check_plain,
    check_writable_dtype,
    contiguous_chunks,
    converted,
    stored_bytes,
    stored_dtype,
)

__all__ = ["HEADER_FRAME_BYTES", "ShardFile", "expected_entry_bytes"]

_MAX_WAITING_BYTES = 16 * 2**20
"""Of the tensors that wait for the end of the file, together."""

_FRAME_OF_ENTRY_BYTES = len(':{"dtype":"","shape":,"data_offsets":[,]},') + 2 * 16
"""Of a header's entry, with offsets of up to a petabyte."""

_ENTRY_BYTES = 120
"""Of a header's entry, besides the name: enough for most tensors, whatever their sizes."""

HEADER_FRAME_BYTES = 2048
"""What a header needs besides `expected_entry_bytes`: its frame, and a tensor of as many dimensions as torch allows, 64."""


def expected_entry_bytes(name: str) -> int:
    """Return how much room a header needs for a tensor of which only the name is known, unless it has many dimensions."""
    return len(json.dumps(name)) + _ENTRY_BYTES


@final
class ShardFile:
    """A safetensors file that is being written. It is complete, and on disk, when `close` has returned.

    Tensors of any strides, devices and shared storages are written one by one, each as if it were alone. Memory: that of
    the tensors that wait, see [Note: aligned tensors without holes], and chunks of 4 MiB.
    """

    def __init__(self, path: Path, header_bytes: int) -> None:
        """Create the file.

        Args:
            path: Where nothing may be yet.
            header_bytes: Room for the header, see `expected_entry_bytes`, `HEADER_FRAME_BYTES` and [Note: a header before the data].

        Raises:
            OSError: Naming the path.
        """
        self._path = path
        self._header_bytes = -(-header_bytes // ALIGNMENT) * ALIGNMENT
        self._data_start = len(encoded_header({}, self._header_bytes))
        self._free_header_bytes = self._header_bytes - len(encoded_header({}))
        self._entries: dict[str, dict[str, Any]] = {}
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._waiting_bytes = 0
        self._offset = 0
        self._file = path.open("xb", buffering=0)
        self._file.seek(self._data_start)

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._path

    @property
    def num_bytes(self) -> int:
        """Size of all tensors so far, without the header."""
        return self._offset + self._waiting_bytes

    @property
    def num_file_bytes(self) -> int:
        """Size of the file, once it is closed."""
        return self._data_start + self.num_bytes

    def has_room_for(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
        """Tell whether a tensor fits into the header, and would be aligned. See the notes of the module."""
        stored = stored_dtype(tensor.dtype, dtype)
        fits_header = _entry_bytes(name, tensor, stored) <= self._free_header_bytes
        return fits_header and self._offset % stored.itemsize == 0

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Write a tensor. It may be changed as soon as this returns.

        Args:
            name: Under which it is found in the file.
            tensor: A plain tensor on any device.
            dtype: What to store it as, if it is a floating-point tensor. None: as it is.

        Raises:
            ValueError: The name is there already or reserved, it does not fit into the header, the tensor has no values
                of its own (a DTensor, a sparse or a meta tensor), its dtype cannot be stored, or values are out of
                range.
            OSError: Naming the path. The file is of no use then.
        """
        stored = stored_dtype(tensor.dtype, dtype)
        entry_bytes = _entry_bytes(name, tensor, stored)
        self._check(name, tensor, stored, entry_bytes)
        num_bytes = stored_bytes(tensor, dtype)
        # Taken before the entry is written, so that a name that waits counts.
        self._free_header_bytes -= entry_bytes
        if num_bytes % ALIGNMENT == 0:
            self._write(name, tensor, dtype)
        elif self._waiting_bytes + num_bytes <= _MAX_WAITING_BYTES:
            self._entries[name] = {}
            kept = converted(name, tensor, dtype).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._waiting.append((name, kept))
            self._waiting_bytes += num_bytes
        else:
            self._write_waiting(stored.itemsize)
            self._write(name, tensor, dtype)

    def close(self) -> None:
        """Write the header, and wait until the file is on disk.

        Raises:
            OSError: Naming the path.
        """
        self._write_waiting(1)
        header = encoded_header(self._entries, self._header_bytes)
        with naming_path(self._path):
            self._file.seek(0)
            self._write_bytes(memoryview(header))
            os.fsync(self._file.fileno())
            self._file.close()

    def abort(self) -> None:
        """Give up: close the file, as far as it is, and remove it. Also after an error, or `close`."""
        self._waiting.clear()
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _check(self, name: str, tensor: torch.Tensor, stored: torch.dtype, entry_bytes: int) -> None:
        check_writable_dtype(stored, name)
        check_name(name)
        if name in self._entries:
            raise ValueError(f"{name} is written a second time to {self._path}. Names must be unique.")
        check_plain(name, tensor)
        if entry_bytes > self._free_header_bytes:
            raise ValueError(
                f"the header of {self._path} has no room for {name[:80]}. Ask has_room_for() first, and begin another file; "
                f"in an empty one, the name is too long."
            )

    def _write(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        start = self._offset
        with naming_path(self._path):
            for chunk in contiguous_chunks(tensor.detach()):
                stored = converted(name, chunk, dtype).to("cpu")
                self._write_bytes(as_bytes(stored))
                self._offset += stored.nbytes
        self._entries[name] = header_entry(stored_dtype(tensor.dtype, dtype), tensor.shape, start)

    def _write_waiting(self, min_itemsize: int) -> None:
        """Write the waiting tensors with elements of a size or wider ones, the widest first."""
        # Sorting is stable: equal runs write equal files.
        for name, tensor in sorted(self._waiting, key=lambda entry: -entry[1].itemsize):
            if tensor.itemsize >= min_itemsize:
                self._write(name, tensor, None)
                self._waiting_bytes -= tensor.nbytes
        self._waiting = [entry for entry in self._waiting if entry[1].itemsize < min_itemsize]

    def _write_bytes(self, content: memoryview) -> None:
        # A raw file may take only a part: at most 2 GiB, or what is left of a disk.
        while content:
            content = content[self._file.write(content) :]


def _entry_bytes(name: str, tensor: torch.Tensor, stored: torch.dtype) -> int:
    """Return how long the entry of a tensor may get, which has no place yet."""
    return len(json.dumps(name)) + len(DTYPE_NAMES.get(stored, "")) + len(str([*tensor.shape])) + _FRAME_OF_ENTRY_BYTES
