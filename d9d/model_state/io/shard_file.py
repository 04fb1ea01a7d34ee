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

import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from safetensors import deserialize
from torch.distributed.tensor import DTensor

from d9d.model_state.io.dtypes import FILE_DTYPES
from d9d.model_state.io.durable import naming_path

__all__ = [
    "HEADER_FRAME_BYTES",
    "ShardFile",
    "check_plain",
    "check_writable_dtype",
    "converted",
    "expected_entry_bytes",
    "stored_bytes",
]

_CHUNK_BYTES = 4 * 2**20
"""What is copied at a time of a tensor that cannot be written from where it is: little enough to stay in a cache."""

_MAX_WAITING_BYTES = 16 * 2**20
"""Of the tensors that wait for the end of the file, together."""

_ALIGNMENT = 8
_HEADER_LENGTH_BYTES = 8
_FRAME_OF_ENTRY_BYTES = len(':{"dtype":"","shape":,"data_offsets":[,]},') + 2 * 16
"""Of a header's entry, with offsets of up to a petabyte."""

_ENTRY_BYTES = 120
"""Of a header's entry, besides the name: enough for most tensors, whatever their sizes."""

HEADER_FRAME_BYTES = 2048
"""What a header needs besides `expected_entry_bytes`: its frame, and a tensor of as many dimensions as torch allows, 64."""

_RESERVED_NAME = "__metadata__"
_METADATA = {"format": "pt"}
"""Whose conventions the tensors follow. transformers refuses files without it."""

_DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}


def expected_entry_bytes(name: str) -> int:
    """Return how much room a header needs for a tensor of which only the name is known, unless it has many dimensions."""
    return len(json.dumps(name)) + _ENTRY_BYTES


def stored_bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Return how many bytes a tensor takes in a file; for ``dtype`` see `ShardFile.add`."""
    return tensor.numel() * _stored_dtype(tensor, dtype).itemsize


def check_writable_dtype(dtype: torch.dtype, what: str) -> None:
    """Refuse a dtype that no file can hold.

    Args:
        dtype: What is to be stored.
        what: Names the tensor or option in the error.

    Raises:
        ValueError: The format has no such dtype, or the installed library does not read it.
    """
    if dtype not in _DTYPE_NAMES or not _is_readable(dtype):
        writable = ", ".join(str(other).removeprefix("torch.") for other in _DTYPE_NAMES if _is_readable(other))
        raise ValueError(
            f"{what} has the dtype {dtype}, which safetensors files cannot hold. Convert it to one of: {writable}."
        )


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that have no dense values on this rank: DTensors, sparse and meta tensors.

    Raises:
        ValueError: Naming the tensor.
    """
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"{name} is a DTensor, of which this rank has only a part. Gather it, as "
            f"ModelStateMapperGatherFullTensor({name!r}) and save_model_state do."
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "is on the meta device, without values" if tensor.is_meta else f"has the layout {tensor.layout}"
        raise ValueError(f"{name} {kind}. Files hold dense tensors with values: materialize or convert it.")


def converted(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor as it is stored: floating-point ones in the given dtype, all others as they are.

    Raises:
        ValueError: A finite value is beyond the range of the dtype.
    """
    stored = _stored_dtype(tensor, dtype)
    if stored == tensor.dtype:
        return tensor
    limits = torch.finfo(stored)
    if tensor.numel() and (limits.max < torch.finfo(tensor.dtype).max or limits.min > torch.finfo(tensor.dtype).min):
        # Some dtypes have no infinity and take their largest value instead, so the result does not show it. Narrow ones
        # would round the limits.
        wide = tensor if tensor.itemsize >= torch.float32.itemsize else tensor.float()
        low, high = torch.aminmax(wide)
        # Infinity and NaN, which hide the others, are no news: these are looked at only where there are some.
        if not (limits.min <= low and high <= limits.max) and _finite_beyond(wide, limits):
            raise ValueError(
                f"{name} has values beyond the range of {stored}, which is {limits.min:g} to {limits.max:g}. Store it as "
                f"torch.bfloat16, which has the range of torch.float32, or with its own dtype (dtype=None)."
            )
    return tensor.to(stored)


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
        self._header_bytes = -(-header_bytes // _ALIGNMENT) * _ALIGNMENT
        self._free_header_bytes = self._header_bytes - len(_encode({_RESERVED_NAME: _METADATA}))
        self._entries: dict[str, dict[str, Any]] = {}
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._waiting_bytes = 0
        self._offset = 0
        self._file = path.open("xb", buffering=0)
        self._file.seek(_HEADER_LENGTH_BYTES + self._header_bytes)

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
        return _HEADER_LENGTH_BYTES + self._header_bytes + self.num_bytes

    def has_room_for(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
        """Tell whether a tensor fits into the header, and would be aligned. See the notes of the module."""
        stored = _stored_dtype(tensor, dtype)
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
        stored = _stored_dtype(tensor, dtype)
        self._check(name, tensor, stored)
        num_bytes = stored_bytes(tensor, dtype)
        # Taken before the entry is written, so that a name that waits counts.
        self._free_header_bytes -= _entry_bytes(name, tensor, stored)
        if num_bytes % _ALIGNMENT == 0:
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
        header = _encode({_RESERVED_NAME: _METADATA, **self._entries}).ljust(self._header_bytes)
        with naming_path(self._path):
            self._file.seek(0)
            self._write_bytes(memoryview(len(header).to_bytes(_HEADER_LENGTH_BYTES, "little") + header))
            os.fsync(self._file.fileno())
            self._file.close()

    def abort(self) -> None:
        """Give up: close the file, as far as it is, and remove it. Also after an error, or `close`."""
        self._waiting.clear()
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _check(self, name: str, tensor: torch.Tensor, stored: torch.dtype) -> None:
        check_writable_dtype(stored, name)
        if name == _RESERVED_NAME:
            raise ValueError(
                f"a tensor cannot be called {name}, which safetensors files keep for themselves. Rename it."
            )
        if name in self._entries:
            raise ValueError(f"{name} is written a second time to {self._path}. Names must be unique.")
        check_plain(name, tensor)
        if _entry_bytes(name, tensor, stored) > self._free_header_bytes:
            raise ValueError(
                f"the header of {self._path} has no room for {name[:80]}. Ask has_room_for() first, and begin another file; "
                f"in an empty one, the name is too long."
            )

    def _write(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        start = self._offset
        with naming_path(self._path):
            for chunk in _contiguous_chunks(tensor.detach()):
                stored = converted(name, chunk, dtype).to("cpu")
                self._write_bytes(stored.reshape(-1).view(torch.uint8).numpy().data)
                self._offset += stored.nbytes
        self._entries[name] = {
            "dtype": _DTYPE_NAMES[_stored_dtype(tensor, dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, self._offset],
        }

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


def _finite_beyond(tensor: torch.Tensor, limits: torch.finfo) -> bool:
    return bool((tensor.isfinite() & ((tensor > limits.max) | (tensor < limits.min))).any())


def _stored_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _encode(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _entry_bytes(name: str, tensor: torch.Tensor, stored: torch.dtype) -> int:
    """Return how long the entry of a tensor may get, which has no place yet."""
    return len(json.dumps(name)) + len(_DTYPE_NAMES.get(stored, "")) + len(str([*tensor.shape])) + _FRAME_OF_ENTRY_BYTES


@functools.cache
def _is_readable(dtype: torch.dtype) -> bool:
    """Ask the installed library whether it knows a dtype: older ones lack some."""
    entry = {"dtype": _DTYPE_NAMES[dtype], "shape": [1], "data_offsets": [0, dtype.itemsize]}
    header = _encode({"x": entry})
    try:
        deserialize(len(header).to_bytes(_HEADER_LENGTH_BYTES, "little") + header + bytes(dtype.itemsize))
    except Exception:  # noqa: BLE001  # the library's errors derive from Exception directly
        return False
    return True


def _contiguous_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in order, as contiguous tensors of at most 4 MiB on its device.

    A view where they already are contiguous; copies of one chunk at a time otherwise.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield from tensor.reshape(-1).split(max(1, _CHUNK_BYTES // tensor.itemsize)) if tensor.numel() else ()
    elif tensor.nbytes <= _CHUNK_BYTES:
        if tensor.ndim == 2 and tensor.stride(0) < tensor.stride(1):
            # A part of a transposed matrix: copied as it lies in memory, and turned over in the cache, in half the time.
            tensor = tensor.T.contiguous().T
        yield tensor.resolve_conj().resolve_neg().contiguous()
    else:
        row_bytes = tensor.itemsize * math.prod(tensor.shape[1:])
        for rows in tensor.split(max(1, _CHUNK_BYTES // row_bytes)):
            yield from _contiguous_chunks(rows if len(rows) > 1 else rows[0])
