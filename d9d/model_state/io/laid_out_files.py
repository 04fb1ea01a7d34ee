"""Files of an export whose layout is known, of which each rank writes the parts that it holds, straight to their places.

[Note: several ranks write one file]
One rank creates the files, at their full size and without a header, so that nobody takes one for complete. All ranks write
into them, none where another one does, and wait until their parts are on disk. Then, after they have agreed that all went
well, the first rank writes the headers. Bytes that nobody writes are zeros.

Between machines that would not be safe: file systems such as NFS write whole pages, so that one machine may write old zeros
over what its neighbour has written to the same page. So all parts of a file come from ranks of one machine, which share its
memory of files. `export_plan` sees to that.
"""

import hashlib
import operator
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import final

import torch

from d9d.model_state.io.durable import naming_path
from d9d.model_state.io.export import ExportOptions
from d9d.model_state.io.export_directory import WrittenShard, remove_files
from d9d.model_state.io.file_layout import FileLayout
from d9d.model_state.io.stored_values import (
    CHUNK_BYTES,
    as_bytes,
    check_plain,
    contiguous_chunks,
    converted,
    stored_dtype,
)
from d9d.model_state.mapper.pieces import Box

__all__ = ["LaidOutFiles"]

_HASHED_BYTES = 2**20


@final
class LaidOutFiles:
    """One rank's part of the files. See [Note: several ranks write one file].

    Args:
        paths: Temporary names of the files.
        layouts: What they hold.
        options: The same on all ranks.
        rank: Position of this rank among those that write these files.
        first_position: Of the files among all of the export.
        in_background: Copy tensors to the host, and write them in a thread.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        layouts: Sequence[FileLayout],
        options: ExportOptions,
        rank: int,
        first_position: int,
        *,
        in_background: bool = False,
    ) -> None:
        self._paths, self._layouts, self._options = paths, layouts, options
        self._rank, self._first_position = rank, first_position
        self._reporters: Sequence[int] = [0]
        self._file_of = {name: number for number, layout in enumerate(layouts) for name in layout.tensors}
        self._open: dict[int, int] = {}
        self._writes: list[Future[None]] = []
        # The only one that touches the files, until `flush` has waited for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="d9d-export") if in_background else None

    def create(self) -> None:
        """Create the files. On the first of the ranks alone, before any writes.

        Raises:
            OSError: Naming the path.
        """
        for path, layout in zip(self._paths, self._layouts, strict=True):
            with naming_path(path), path.open("xb", buffering=0) as file:
                file.truncate(layout.num_bytes)

    def share_reports(self, ranks: Sequence[int]) -> None:
        """Let several ranks report files, as digests take long.

        Args:
            ranks: Those that see the files, the same on all ranks.
        """
        if self._options.manifest:
            self._reporters = ranks

    def write_whole(self, name: str, values: torch.Tensor) -> None:
        """Write all of a tensor, as `write`.

        Raises:
            ValueError: It is not what was expected when the files were laid out.
        """
        check_plain(name, values)
        expected = self._layouts[self._file_of[name]].tensors[name]
        found = tuple(values.shape), stored_dtype(values.dtype, self._options.dtype)
        if found != (expected.shape, expected.dtype):
            raise ValueError(
                f"{name} was made with the shape {found[0]} and {found[1]}, but {expected.shape} and {expected.dtype} were "
                f"foreseen. apply() of the mapper must make the same of the same inputs, also of those on the meta device."
            )
        self.write(name, Box.whole(expected.shape), values)

    def write(self, name: str, box: Box, values: torch.Tensor, dtypes: Sequence[torch.dtype] = ()) -> None:
        """Write a part of a tensor, which may then be changed.

        Args:
            name: The tensor.
            box: Where the part lies in it.
            values: The part, on any device and of any strides.
            dtypes: What it is converted to first, in this order.

        Raises:
            ValueError: Values are out of the range of the dtype that they are stored as.
            OSError: Naming the path.
        """
        number = self._file_of[name]
        tensor = self._layouts[number].tensors[name]
        strides: list[int] = []
        stride = tensor.dtype.itemsize
        for size in reversed(tensor.shape):
            strides.insert(0, stride)
            stride *= size
        position = self._layouts[number].starts[name] + sum(map(operator.mul, box.start, strides))
        part = _Part(name, tensor.dtype, tuple(dtypes), self._options.dtype)
        if self._thread is None:
            self._write(number, part, values.detach(), position, strides)
            return
        # Converted where it is, so that less travels and waits.
        copied = part.stored(values.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)
        done = _Part(name, tensor.dtype, (), None)
        self._writes.append(self._thread.submit(self._write, number, done, copied, position, strides))

    def flush(self) -> None:
        """Wait until the parts of this rank are on disk.

        Raises:
            OSError: Naming the path.
            ValueError: As `write`, of what was written in the background.
        """
        if self._thread is not None:
            for write in self._writes:
                write.result()
            self._thread.shutdown()
        for number, descriptor in self._open.items():
            with naming_path(self._paths[number]):
                os.fsync(descriptor)

    def complete(self) -> list[WrittenShard]:
        """Write the headers on the first rank, when the parts of all ranks are on disk.

        Returns:
            The files that this rank reports.

        Raises:
            OSError: Naming the path.
        """
        if self._rank == 0:
            for number, layout in enumerate(self._layouts):
                descriptor = self._descriptor(number)
                with naming_path(self._paths[number]):
                    _write_at(descriptor, memoryview(layout.header), 0)
                    os.fsync(descriptor)
        self._close()
        reporters = self._reporters
        numbers = range(len(self._layouts))
        return [self._written(number) for number in numbers if reporters[number % len(reporters)] == self._rank]

    def abort(self) -> None:
        """Give up, also after an error: close the files, and remove them if this is the first rank."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._close()
        if self._rank == 0:
            remove_files(self._paths)

    def _written(self, number: int) -> WrittenShard:
        layout, path = self._layouts[number], self._paths[number]
        return WrittenShard(
            name=path.name,
            position=(self._first_position, number),
            num_bytes=layout.num_bytes,
            tensors={name: tensor.num_bytes for name, tensor in layout.tensors.items()},
            digest=_digest(path, layout.header) if self._options.manifest else None,
        )

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self._paths[number], os.O_WRONLY | os.O_CLOEXEC)
        return self._open[number]

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _write(self, number: int, part: "_Part", values: torch.Tensor, position: int, strides: Sequence[int]) -> None:
        """Write values whose elements lie at given distances in the file, dimension by dimension."""
        if values.numel() == 0:
            return
        run_dim = _run_dim(tuple(values.shape), strides, part.dtype.itemsize)
        num_bytes = values.numel() * max(values.itemsize, part.dtype.itemsize)
        descriptor = self._descriptor(number)
        if run_dim == 0:
            for chunk in contiguous_chunks(values):
                content = as_bytes(part.stored(chunk).to("cpu"))
                with naming_path(self._paths[number]):
                    _write_at(descriptor, content, position)
                position += len(content)
        elif num_bytes <= CHUNK_BYTES:
            content = as_bytes(part.stored(next(contiguous_chunks(values))).to("cpu"))
            positions = [position]
            for size, stride in zip(values.shape[:run_dim], strides[:run_dim], strict=True):
                positions = [start + index * stride for start in positions for index in range(size)]
            run_bytes = len(content) // len(positions)
            with naming_path(self._paths[number]):
                for index, start in enumerate(positions):
                    _write_at(descriptor, content[index * run_bytes : (index + 1) * run_bytes], start)
        elif len(values) == 1:
            self._write(number, part, values[0], position, strides[1:])
        else:
            rows = max(1, len(values) * CHUNK_BYTES // num_bytes)
            for first in range(0, len(values), rows):
                self._write(number, part, values[first : first + rows], position + first * strides[0], strides)


@final
class _Part:
    """How the values of a part become those of the file."""

    def __init__(
        self, name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...], option: torch.dtype | None
    ) -> None:
        self.name, self.dtype = name, dtype
        self._dtypes, self._option = dtypes, option

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        for dtype in self._dtypes:
            values = values.to(dtype)
        return converted(self.name, values, self._option)


def _run_dim(shape: tuple[int, ...], strides: Sequence[int], itemsize: int) -> int:
    """Return the first dimension from which on all values lie next to each other in the file."""
    expected, run_dim = itemsize, len(shape)
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return run_dim
            expected *= shape[dim]
        run_dim = dim
    return run_dim


def _write_at(descriptor: int, content: memoryview, position: int) -> None:
    # A call may take only a part: at most 2 GiB, or what is left of a disk.
    while content:
        num_bytes = os.pwrite(descriptor, content, position)
        content, position = content[num_bytes:], position + num_bytes


def _digest(path: Path, header: bytes) -> str:
    """Return the hexadecimal SHA-256 digest of a file, of which only the header need not be in place yet."""
    digest = hashlib.sha256(header)
    with path.open("rb") as file:
        file.seek(len(header))
        while content := file.read(_HASHED_BYTES):
            digest.update(content)
    return digest.hexdigest()
