"""Writes the files of a checkpoint: PyTorch's distributed checkpoint format, each file hashed and on the disk."""

import hashlib
import io
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import Buffer

from d9d.checkpoint.record import FileDigest
from d9d.checkpoint.safe_reader import MANIFEST_NAME, manifest_of

__all__ = ["HashingWriter", "sync_folder"]

_MIN_BYTES_IN_THREAD = 1 << 16
"""Below this a thread costs more than it saves."""


class HashingWriter(filesystem.FileSystemWriter):
    """Writes a checkpoint to a new folder, with each file on the disk and hashed before it says so.

    The bytes depend on the state alone.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.digests: dict[str, FileDigest] = {}
        """Files that this rank has written."""
        self.fs = _HashingFileSystem(self.digests)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan asks for. Blocks."""
        if plan.items:
            return super().write_data(plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write which part of which tensor is where. Blocks. One rank must call it."""
        super().finish(metadata, results)
        with self.fs.create_stream(Path(self.path) / MANIFEST_NAME, "wb") as file:
            file.write(manifest_of(metadata))
            os.fsync(file.fileno())

    def storage_meta(self) -> StorageMeta | None:
        """Say nothing of time and place: two writings of one state give the same bytes."""
        return StorageMeta()


class _HashingFileSystem(filesystem.FileSystem):
    """Hashes what is written to files."""

    def __init__(self, digests: dict[str, FileDigest]) -> None:
        self._digests = digests

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with ThreadPoolExecutor(1) as executor, Path(path).open(mode) as file:
            stream = _HashingStream(file, executor)
            yield stream
        self._digests[Path(path).name] = stream.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._digests[Path(new_path).name] = self._digests.pop(Path(path).name)


class _HashingStream(io.RawIOBase):
    """Writes and hashes at the same time: neither holds the interpreter's lock. What is written is not read again."""

    def __init__(self, file: IO[bytes], executor: ThreadPoolExecutor) -> None:
        self._file = file
        self._executor = executor
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0

    @property
    def digest(self) -> FileDigest:
        """Size and digest of what was written so far."""
        return FileDigest(size_bytes=self._num_bytes, sha256=self._sha256.hexdigest())

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _MIN_BYTES_IN_THREAD:
            self._sha256.update(view)
            self._file.write(view)
        else:
            # The memory may be changed as soon as this returns, so it waits for both.
            hashed = self._executor.submit(self._sha256.update, view)
            self._file.write(view)
            hashed.result()
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
