"""Writes the files of a checkpoint: PyTorch's distributed checkpoint format, each file hashed and on the disk."""

import dataclasses
import io
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]  # what the reader of PyTorch takes (2.11 to 2.14)
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import Buffer

from d9d.checkpoint.digest import FileDigest, PieceHasher
from d9d.checkpoint.safe_reader import MANIFEST_NAME, manifest_of

__all__ = ["CheckpointWriter", "Written", "sync_folder"]

_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a rank has written of a checkpoint."""

    results: Sequence[WriteResult]
    """Where each part is."""
    files: dict[str, FileDigest]
    """Its files, by name."""
    starts: dict[MetadataIndex, int]
    """Offset in the file of the first element of tensors whose elements follow each other there, row by row."""


class CheckpointWriter(filesystem.FileSystemWriter):
    """Writes a checkpoint to a new folder, with each file on the disk and hashed before it says so.

    The bytes depend on the state alone.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.files: dict[str, FileDigest] = {}
        """Files that this rank has written."""
        self.starts: dict[MetadataIndex, int] = {}
        """See `Written.starts`."""
        self.fs = _HashingFileSystem(self.files)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan asks for. Blocks."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"
            with self.fs.create_stream(Path(self.path) / name, "wb") as file:
                # Values first, as PyTorch does.
                items = sorted(plan.items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
                results = [self._write_item(file, name, item, planner) for item in items]
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_item(self, file: "_HashingStream", name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        offset = file.tell()
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            start = file.write_tensor(data.detach())
            if start is not None:
                self.starts[item.index] = start
        else:
            file.write(data.getbuffer())
        length = file.tell() - offset
        return WriteResult(
            index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, offset=offset, length=length)
        )

    def finish_all(self, metadata: Metadata, written: Sequence[Written]) -> None:
        """Write which part of which tensor is where. Blocks. One rank must call it, with what all have written."""
        super().finish(metadata, [list(of_rank.results) for of_rank in written])
        starts = {index: start for of_rank in written for index, start in of_rank.starts.items()}
        with self.fs.create_stream(Path(self.path) / MANIFEST_NAME, "wb") as file:
            file.write(manifest_of(metadata, starts))
            os.fsync(file.fileno())

    def storage_meta(self) -> StorageMeta | None:
        """Say nothing of time and place: two writings of one state give the same bytes."""
        return StorageMeta()


class _HashingFileSystem(filesystem.FileSystem):
    """Hashes what is written to files."""

    def __init__(self, files: dict[str, FileDigest]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator["_HashingStream", None, None]:
        with Path(path).open(mode) as file:
            stream = _HashingStream(file, Path(path))
            yield stream
        self._files[Path(path).name] = stream.digest()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make nothing: the first rank has made the folder, which others may not see yet where the disk is of a network."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._files[Path(new_path).name] = self._files.pop(Path(path).name)


class _HashingStream(io.RawIOBase):
    """Writes and hashes, block by block: what was just written is still in a cache of the core."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._failure: OSError | None = None
        self._hasher = PieceHasher()
        self._tensor: torch.Tensor | None = None
        self._start: int | None = None

    def write_tensor(self, data: torch.Tensor) -> int | None:
        """Write a tensor in PyTorch's format.

        Returns:
            Where the first element is, if all of them follow each other row by row.
        """
        tensor = data.cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a part of a larger storage, all of which would be written
        self._tensor, self._start = tensor, None
        try:
            torch.save(tensor, cast(IO[bytes], self))
        except RuntimeError as error:
            # What PyTorch says when it cannot finish its file after a write that has failed.
            raise self._failure or error from error
        self._tensor = None
        return self._start if tensor.is_contiguous() else None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if self._tensor is not None and _is_memory_of(self._tensor, view):
            self._start = self.tell()
        try:
            for start in range(0, len(view), _BLOCK_BYTES):
                block = view[start : start + _BLOCK_BYTES]
                self._file.write(block)
                self._hasher.append(block)
        except OSError as error:
            self._failure = OSError(error.errno, error.strerror, str(self._path))
            raise self._failure from error
        return len(view)

    def digest(self) -> FileDigest:
        return self._hasher.digest()

    def tell(self) -> int:
        return self._hasher.num_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()


def _is_memory_of(tensor: torch.Tensor, view: memoryview) -> bool:
    """Tell whether a view is all the memory of a tensor."""
    if len(view) == 0 or len(view) != tensor.nbytes:
        return False
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0] == tensor.untyped_storage().data_ptr()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
