"""Digests of files: found in passing while a file is written, and by several threads when it is verified.

[Note: digests of pieces]
XXH3 (128 bits) finds what disks, networks and people do to files, at 15 GB/s on a core, where SHA-256 comes to 0.4 to 1.8 and
would be slower than good disks. It does not find what somebody does on purpose, who could write another commit record as well.
Digests are computed from the first byte to the last, on one core. So a file is cut into pieces of 4 MiB, and its digest is that
of the digests of its pieces, in their order: pieces are read and hashed in any order when a file is verified.
"""

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

__all__ = ["FileDigest", "PieceHasher", "digest_file", "io_threads"]

_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 256 << 10
"""What is read at a time: little enough to be hashed from a cache of the core."""
_MAX_THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and digest of a file of a checkpoint. See [Note: digests of pieces]."""

    size_bytes: int
    xxh3: str


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
    """Hashes what is appended to a file."""

    def __init__(self) -> None:
        self._of_file = xxhash.xxh3_128()
        self._of_piece = xxhash.xxh3_128()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were appended."""
        return self._num_bytes

    def append(self, data: memoryview) -> None:
        """Take the next bytes."""
        while data:
            room = _PIECE_BYTES - self._num_bytes % _PIECE_BYTES
            self._of_piece.update(data[:room])
            self._num_bytes += min(room, len(data))
            if self._num_bytes % _PIECE_BYTES == 0:
                self._end_piece()
            data = data[room:]

    def digest(self) -> FileDigest:
        """Return size and digest of what was appended, all of it."""
        if self._num_bytes % _PIECE_BYTES > 0:
            self._end_piece()
        return FileDigest(size_bytes=self._num_bytes, xxh3=self._of_file.hexdigest())

    def _end_piece(self) -> None:
        self._of_file.update(self._of_piece.digest())
        self._of_piece.reset()


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
        of_file = xxhash.xxh3_128(b"".join(pieces))
    return FileDigest(size_bytes=num_bytes, xxh3=of_file.hexdigest())


def _digest_piece(descriptor: int, start: int) -> bytes:
    of_piece = xxhash.xxh3_128()
    # Read, not mapped: a disk that fails is an error then, and does not kill the process.
    block = memoryview(bytearray(_BLOCK_BYTES))
    for offset in range(start, start + _PIECE_BYTES, _BLOCK_BYTES):
        num_read = os.preadv(descriptor, [block], offset)
        of_piece.update(block[:num_read])
        if num_read < _BLOCK_BYTES:
            break
    return of_piece.digest()
