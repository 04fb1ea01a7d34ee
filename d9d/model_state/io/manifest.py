"""Checksums beside the weights: safetensors has none, so a flipped bit would be read as another weight."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from d9d.model_state.io.durable import json_bytes, write_durably
from d9d.model_state.io.files import INDEX_NAME

__all__ = ["MANIFEST_NAME", "file_digest", "verify_manifest", "write_manifest"]

MANIFEST_NAME = "model.sha256.json"
"""Name of the manifest: a JSON object of hexadecimal SHA-256 digests by file name, as `sha256sum` prints them."""

_MAX_MANIFEST_BYTES = 16 * 2**20
_NUM_LISTED = 10


def file_digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 digest of a file. Reads all of it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest of a model state, in place of an older one. Returns when it is on disk.

    Args:
        directory: Where the files are.
        digests: Hexadecimal SHA-256 digests by file name.
    """
    write_durably(directory / MANIFEST_NAME, json_bytes(dict(sorted(digests.items()))))


def verify_manifest(directory: Path, files: Collection[str]) -> None:
    """Compare files with the manifest beside them; without a manifest, do nothing. Reads all of the files.

    The index, which says where each tensor is, is compared too, where there is one that the manifest knows.

    Args:
        directory: Where the manifest is.
        files: Names of files of tensors, relative to the directory.

    Raises:
        ValueError: Naming all files that are not what the manifest says, or that it does not know, and the reason.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return
    digests = _read_manifest(path)
    if INDEX_NAME in digests and (directory / INDEX_NAME).is_file():
        files = {*files, INDEX_NAME}
    problems: list[str] = []
    for name in sorted(files):
        expected = digests.get(name)
        if expected is None:
            problems.append(f"{name} is not in the manifest")
        elif not (directory / name).is_file():
            problems.append(f"{name} is missing")
        elif (found := file_digest(directory / name)) != expected:
            problems.append(f"{name} has the digest {found}, expected {expected}")
    if problems:
        more = f"; and {len(problems) - _NUM_LISTED} more" if len(problems) > _NUM_LISTED else ""
        raise ValueError(
            f"{len(problems)} of {len(files)} files in {directory} are not those that {MANIFEST_NAME} was written for: "
            f"{'; '.join(problems[:_NUM_LISTED])}{more}. They were damaged or exchanged: copy them again from where they "
            f"came from. If you changed them on purpose, remove {path}."
        )


def _read_manifest(path: Path) -> dict[str, str]:
    num_bytes = path.stat().st_size
    if num_bytes > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes; a manifest has at most {_MAX_MANIFEST_BYTES}.")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Copy it again, or remove it to load without checks.") from error
    if not isinstance(content, dict) or not all(isinstance(digest, str) for digest in content.values()):
        raise ValueError(f"{path} must be a JSON object of hexadecimal SHA-256 digests by file name.")
    return {str(name): str(digest) for name, digest in content.items()}
