"""The files of an export in their directory: temporary ones that nobody takes for weights, and their final names.

[Note: what a stopped export leaves]
Shards are written under temporary names, while an older export stays as it is. Then, on one rank: the index, the single
file and the manifest of the older one go; the shards get their names; the index comes last. So at any time there is
either the older export, or the new one, or no index and no single file: then nothing there is taken for complete. A
single file is complete by its name alone, and takes the place of an older one at once.

All temporary names have something random in them, and a lock keeps other exports out meanwhile, see
[Note: owners that were killed]: so the shards that get their names are those that this export has written. Where a file system
has no locks, two exports at once still do not mix, but one removes the shards of the other, which fails.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from d9d.core.directory_lock import DirectoryLock
from d9d.model_state.io.durable import flush_directory, json_bytes, write_durably
from d9d.model_state.io.files import INDEX_NAME, SINGLE_NAME
from d9d.model_state.io.manifest import MANIFEST_NAME, write_manifest

__all__ = [
    "LOCK_NAME",
    "WrittenShard",
    "lock_for_export",
    "prepare_directory",
    "publish",
    "remove_files",
    "temporary_name",
]

LOCK_NAME = ".tmp-export.lock"
"""File that says, while an export is in progress, which process leads it."""

_SHARD_NAME = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_TEMPORARY_NAME = re.compile(
    r"\.tmp-rank\d+-shard-\d+(-[0-9a-f]+)?\.safetensors|\.tmp-model\.(safetensors\.index|sha256)\.json(-[0-9a-f]+)?"
)

_NUM_LISTED = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """A file of tensors that is on disk under its temporary name.

    Attributes:
        name: The temporary name.
        position: Where it comes among all of the export, which are numbered by it.
        num_bytes: Size of the file.
        tensors: Size in bytes of each tensor in it, by name.
        digest: Hexadecimal SHA-256 digest of the file; None if no manifest is asked for.
    """

    name: str
    position: tuple[int, int]
    num_bytes: int
    tensors: Mapping[str, int]
    digest: str | None


def temporary_name(rank: int, index: int, token: str) -> str:
    """Return what a shard is called while it is written.

    Args:
        rank: Rank that writes it, among those that export together.
        index: Counts the shards of the rank from 0.
        token: Hexadecimal digits that no other export has.
    """
    return f".tmp-rank{rank}-shard-{index}-{token}.safetensors"


def lock_for_export(directory: Path) -> DirectoryLock:
    """Keep other exports out of a directory.

    Raises:
        OSError: Another export into it is in progress, or it cannot be used.
    """
    return DirectoryLock(
        directory / LOCK_NAME,
        f"another export into {directory}",
        "Wait until it is complete (for one in the background, call its wait() first), or export into another directory.",
    )


def prepare_directory(directory: Path) -> DirectoryLock:
    """Create the directory of an export, lock it, and remove what a stopped one has left there. For one rank only.

    Raises:
        OSError: Another export into the directory is in progress, or it cannot be used.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = lock_for_export(directory)
    try:
        for path in directory.iterdir():
            if _TEMPORARY_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files of an export that has failed, as far as that is possible."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def publish(directory: Path, shards: Sequence[WrittenShard]) -> None:
    """Turn the shards of all ranks into a model state, in place of an older one. For one rank only.

    See [Note: what a stopped export leaves].

    Args:
        directory: Where the shards are. It is locked.
        shards: All of them, in the order of their final numbers; at least one.

    Raises:
        OSError: Naming the path, also of a shard that is not there as it was written.
    """
    _check_written(directory, shards)
    names = _final_names(len(shards))
    is_single = len(shards) == 1
    for name in [INDEX_NAME, MANIFEST_NAME] if is_single else [INDEX_NAME, SINGLE_NAME, MANIFEST_NAME]:
        (directory / name).unlink(missing_ok=True)
    flush_directory(directory)
    digests = {name: shard.digest for name, shard in zip(names, shards, strict=True) if shard.digest is not None}
    index = json_bytes(_index(names, shards))
    if digests:
        if not is_single:
            digests[INDEX_NAME] = hashlib.sha256(index).hexdigest()
        write_manifest(directory, digests)
    for name, shard in zip(names, shards, strict=True):
        (directory / shard.name).replace(directory / name)
    flush_directory(directory)
    if not is_single:
        write_durably(directory / INDEX_NAME, index)
    for path in directory.iterdir():
        if _SHARD_NAME.fullmatch(path.name) and path.name not in names:
            path.unlink()
    flush_directory(directory)


def _final_names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def _index(names: Sequence[str], shards: Sequence[WrittenShard]) -> dict[str, object]:
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard.tensors}
    total_size = sum(num_bytes for shard in shards for num_bytes in shard.tensors.values())
    return {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}


def _check_written(directory: Path, shards: Sequence[WrittenShard]) -> None:
    wrong: list[str] = []
    for shard in shards:
        try:
            # Opened, as a network file system need not know before how long a file of another machine is.
            with (directory / shard.name).open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            wrong.append(f"{shard.name} is not there")
            continue
        if num_bytes != shard.num_bytes:
            wrong.append(f"{shard.name} has {num_bytes} bytes, of {shard.num_bytes}")
    if wrong:
        raise FileNotFoundError(
            f"{len(wrong)} of {len(shards)} shards that the ranks wrote to {directory} are not as they were written, as "
            f"seen from the first rank: {'; '.join(wrong[:_NUM_LISTED])}. All ranks must write to one file system that they "
            f"share, and nothing else may remove files there meanwhile."
        )
