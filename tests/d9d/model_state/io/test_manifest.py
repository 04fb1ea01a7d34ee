"""Digests of files, against those of sha256sum and hashlib."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from d9d.model_state.io.manifest import MANIFEST_NAME, file_digest, verify_manifest, write_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, content in {"a": b"alpha", "b": b"", "c": bytes(range(256))}.items():
        (tmp_path / name).write_bytes(content)
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in "abc"}
    write_manifest(tmp_path, digests)
    return tmp_path


def test_files_as_they_were(directory: Path):
    verify_manifest(directory, ["a", "b", "c"])
    verify_manifest(directory, ["c"])
    # SHA-256 of nothing, from the standard's test vectors.
    assert file_digest(directory / "b") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sorted(path.name for path in directory.iterdir()) == ["a", "b", "c", MANIFEST_NAME]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_digests_are_those_of_sha256sum(directory: Path):
    for name, digest in json.loads((directory / MANIFEST_NAME).read_text()).items():
        command = ["sha256sum", str(directory / name)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0] == digest


def test_without_a_manifest_nothing_is_checked(tmp_path: Path):
    verify_manifest(tmp_path, ["not there"])


def test_each_bit_counts(directory: Path):
    content = bytearray((directory / "c").read_bytes())
    content[100] ^= 1
    (directory / "c").write_bytes(content)
    verify_manifest(directory, ["a", "b"])
    with pytest.raises(ValueError, match=r"1 of 3 files in .* c has the digest .*, expected .*damaged") as caught:
        verify_manifest(directory, ["a", "b", "c"])
    assert hashlib.sha256(bytes(content)).hexdigest() in str(caught.value)


def test_the_index_counts_where_the_manifest_knows_it(directory: Path):
    index = directory / "model.safetensors.index.json"
    index.write_bytes(b"one")
    # Of a manifest that somebody has made of the weights alone.
    verify_manifest(directory, ["a"])
    digests = json.loads((directory / MANIFEST_NAME).read_text())
    write_manifest(directory, {**digests, index.name: hashlib.sha256(b"one").hexdigest()})
    verify_manifest(directory, ["a"])
    index.write_bytes(b"two")
    with pytest.raises(ValueError, match=r"1 of 2 files .*: model\.safetensors\.index\.json has the digest"):
        verify_manifest(directory, ["a"])
    # Files that were taken from among the others are what they were.
    index.unlink()
    verify_manifest(directory, ["a"])


def test_all_problems_in_one_error(directory: Path):
    (directory / "a").unlink()
    (directory / "b").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"3 of 4 files .*: a is missing; b has the digest .*; new is not in the manifest\. They"
    ):
        verify_manifest(directory, ["new", "a", "b", "c"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": 1}', "must be a JSON object"),
    ],
)
def test_a_broken_manifest_is_refused(directory: Path, content: bytes, message: str):
    (directory / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        verify_manifest(directory, ["a"])


def test_a_huge_manifest_is_not_read(directory: Path):
    with (directory / MANIFEST_NAME).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="1099511627776 bytes; a manifest has at most"):
        verify_manifest(directory, ["a"])
