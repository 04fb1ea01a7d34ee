"""Digests of pieces: the same whether a file is written, in whatever parts, or read."""

import random
from pathlib import Path

import pytest
import xxhash

from d9d.checkpoint.digest import PieceHasher, digest_file

PIECE = 4 << 20


def expected(data: bytes) -> str:
    pieces = [xxhash.xxh3_128(data[start : start + PIECE]).digest() for start in range(0, len(data), PIECE)]
    return xxhash.xxh3_128(b"".join(pieces)).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 300_000, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 12345])
def test_written_and_read(tmp_path: Path, size: int):
    generator = random.Random(size)
    data = generator.randbytes(size)
    (tmp_path / "file").write_bytes(data)
    read = digest_file(tmp_path / "file")
    assert (read.size_bytes, read.xxh3) == (size, expected(data))
    hasher, left = PieceHasher(), memoryview(data)
    while left:
        taken = generator.choice([1, 17, 4096, 1_000_000, PIECE, 3 * PIECE])
        hasher.append(left[:taken])
        left = left[taken:]
    assert hasher.num_bytes == size
    assert hasher.digest() == read
