"""Writes the files of a checkpoint: PyTorch's distributed checkpoint format, each file hashed and on the disk."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from d9d.checkpoint.record import FileDigest, digest_file
from d9d.checkpoint.safe_reader import METADATA_NAME

__all__ = ["HashingWriter", "sync_folder"]


class HashingWriter(filesystem.FileSystemWriter):
    """Writes a checkpoint to a new folder, with each file on the disk and hashed before it says so.

    The bytes depend on the state alone.
    """

    def __init__(self, folder: Path) -> None:
        # Files are synced here, see `_sync_and_digest`.
        super().__init__(folder, sync_files=False, overwrite=False)
        self._folder = folder
        self.digests: dict[str, FileDigest] = {}
        """Files that this rank has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan asks for. Blocks."""
        if not plan.items:
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        written = super().write_data(plan, planner)
        for name in sorted({result.storage_data.relative_path for result in written.value()}):
            self.digests[name] = _sync_and_digest(self._folder / name)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write which part of which tensor is where. Blocks. One rank must call it."""
        super().finish(metadata, results)
        self.digests[METADATA_NAME] = _sync_and_digest(self._folder / METADATA_NAME)

    def storage_meta(self) -> StorageMeta | None:
        """Say nothing of time and place: two writings of one state give the same bytes."""
        return StorageMeta()


def _sync_and_digest(path: Path) -> FileDigest:
    """Wait until a file is on the disk, and hash it meanwhile: it is in the page cache."""
    with path.open("rb") as file, ThreadPoolExecutor(1) as executor:
        synced = executor.submit(os.fsync, file.fileno())
        digest = digest_file(path)
        synced.result()
    return digest


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
