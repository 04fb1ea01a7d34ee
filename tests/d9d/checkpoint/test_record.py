"""The commit record: what it finds."""

from pathlib import Path

import pytest
import xxhash

from d9d.checkpoint.digest import digest_file
from d9d.checkpoint.record import RECORD_NAME, CommitRecord

CONTENT = {"__0_0.distcp": b"0123456789" * 30, "__1_0.distcp": b"abcdefghij" * 30, ".metadata": b"what is where"}


def committed(folder: Path) -> CommitRecord:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    record = CommitRecord(step=7, num_ranks=2, files={name: digest_file(folder / name) for name in CONTENT})
    (folder / RECORD_NAME).write_bytes(record.to_bytes())
    return record


def problems(folder: Path) -> list[str]:
    record = CommitRecord.read(folder)
    return record.size_problems(folder) or record.content_problems(folder, list(record.files))


def test_an_intact_checkpoint(tmp_path: Path):
    record = committed(tmp_path)
    assert CommitRecord.read(tmp_path) == record
    assert problems(tmp_path) == []
    assert record.files[".metadata"].xxh3 == xxhash.xxh3_128(xxhash.xxh3_128(b"what is where").digest()).hexdigest()
    assert record.size_bytes == sum(map(len, CONTENT.values()))


@pytest.mark.parametrize("name", [*CONTENT, RECORD_NAME])
def test_every_bit_counts(tmp_path: Path, name: str):
    committed(tmp_path)
    path = tmp_path / name
    intact = path.read_bytes()
    for bit in range(0, 8 * len(intact), 7):  # seven and eight have no common factor: all bits of a byte, all bytes
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if name == RECORD_NAME:
            with pytest.raises(ValueError, match=rf"{RECORD_NAME} is damaged"):
                CommitRecord.read(tmp_path)
        else:
            assert problems(tmp_path) == [f"{path} is damaged: its content is not what was written"]


def test_missing_short_zeroed_and_swapped_files(tmp_path: Path):
    committed(tmp_path)
    first, second = tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp"
    first.write_bytes(CONTENT[first.name][:-1])
    assert problems(tmp_path) == [f"{first} has 299 bytes, and 300 were written"]
    first.write_bytes(bytes(300))
    assert problems(tmp_path) == [f"{first} is damaged: its content is not what was written"]
    first.write_bytes(CONTENT[second.name])
    second.write_bytes(CONTENT[first.name])
    assert len(problems(tmp_path)) == 2
    first.unlink()
    assert problems(tmp_path) == [f"{first} is missing"]
    first.symlink_to(second)
    assert problems(tmp_path) == [f"{first} is missing: a link or the like has its name"]


def test_no_record(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        CommitRecord.read(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/b", "a\\b", "..", ".", "", "a\0", RECORD_NAME])
def test_files_elsewhere_are_refused(tmp_path: Path, name: str):
    record = committed(tmp_path)
    forged = CommitRecord(step=7, num_ranks=2, files={name: record.files[".metadata"]})
    (tmp_path / RECORD_NAME).write_bytes(forged.to_bytes())
    with pytest.raises(ValueError, match="files outside"):
        CommitRecord.read(tmp_path)
