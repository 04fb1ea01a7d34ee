"""Digests of files that several threads compute together.

[Note: digests of pieces]
SHA-256 is computed from the first byte to the last, on one core: 0.4 to 1.8 GB/s, less than good disks give. So a file is cut
into pieces of 4 MiB, and its digest is the SHA-256 of the SHA-256 digests of its pieces, in their order. Pieces are hashed in
any order, while a file is written and when it is verified.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

__all__ = ["FileDigest", "PieceHasher", "digest_file", "io_threads"]

_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 256 << 10
"""What is read at a time: little enough to be hashed from a cache of the core."""
_MAX_THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and digest of a file of a checkpoint. See [Note: digests of pieces]."""

    size_bytes: int
    sha256: str


@functools.cache
def io_threads() -> ThreadPoolExecutor:
    """Return the threads of this process that read and hash; as many as it may use cores, up to 8.

    Their tasks must not wait for each other.
    """
    num_cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(min(num_cores, _MAX_THREADS), thread_name_prefix="checkpoint-io")


# A process that is forked has the object and none of its threads.
os.register_at_fork(after_in_child=io_threads.cache_clear)


class PieceHasher:
    """Hashes what is appended to a file, by threads beside the one that appends."""

    def __init__(self) -> None:
        self._pieces: list[Future[bytes]] = []
        self._parts: list[tuple[memoryview, object]] = []
        self._room = _PIECE_BYTES
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were appended."""
        return self._num_bytes

    def append(self, data: memoryview, owner: object) -> None:
        """Take data, which nobody may change before `digest` or `wait` has returned.

        Args:
            data: Bytes.
            owner: Keeps the memory of the data alive; held for as long as it is needed.
        """
        self._num_bytes += len(data)
        for start, stop in _cut(len(data), self._room):
            self._parts.append((data[start:stop], owner))
            self._room -= stop - start
            if self._room == 0:
                self._submit()

    def wait(self) -> None:
        """Wait until all pieces that are full are hashed, so that their memory is free."""
        for piece in self._pieces:
            piece.result()

    def digest(self) -> FileDigest:
        """Return size and digest of what was appended. Blocks until it is hashed."""
        if self._parts:
            self._submit()
        of_file = hashlib.sha256(b"".join(piece.result() for piece in self._pieces))
        return FileDigest(size_bytes=self._num_bytes, sha256=of_file.hexdigest())

    def _submit(self) -> None:
        self._pieces.append(io_threads().submit(_digest_parts, self._parts))
        self._parts, self._room = [], _PIECE_BYTES


def _cut(num_bytes: int, first: int) -> Iterator[tuple[int, int]]:
    """Cut a range into one of a size of its own and pieces."""
    start, stop = 0, min(first, num_bytes)
    while start < num_bytes:
        yield start, stop
        start, stop = stop, min(stop + _PIECE_BYTES, num_bytes)


def _digest_parts(parts: list[tuple[memoryview, object]]) -> bytes:
    sha256 = hashlib.sha256()
    for data, _ in parts:
        sha256.update(data)
    parts.clear()  # whoever waits for the result still has the list, which must not keep memory alive
    return sha256.digest()


def digest_file(path: Path) -> FileDigest:
    """Read a file and return its size and digest. Blocks; several threads read and hash.

    Raises:
        OSError: If it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        starts = range(0, num_bytes, _PIECE_BYTES)
        # Not by `map` of the threads where there is one piece: most files of a checkpoint are small.
        digest = functools.partial(_digest_piece, file.fileno())
        pieces = io_threads().map(digest, starts) if len(starts) > 1 else map(digest, starts)
        of_file = hashlib.sha256(b"".join(pieces))
    return FileDigest(size_bytes=num_bytes, sha256=of_file.hexdigest())


def _digest_piece(descriptor: int, start: int) -> bytes:
    sha256 = hashlib.sha256()
    # Read, not mapped: a disk that fails is an error then, and does not kill the process.
    block = memoryview(bytearray(_BLOCK_BYTES))
    for offset in range(start, start + _PIECE_BYTES, _BLOCK_BYTES):
        num_read = os.preadv(descriptor, [block], offset)
        sha256.update(block[:num_read])
        if num_read < _BLOCK_BYTES:
            break
    return sha256.digest()
