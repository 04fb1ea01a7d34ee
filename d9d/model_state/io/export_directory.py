"""The files of an export in their directory: temporary ones that nobody takes for weights, and their final names.

[Note: what a stopped export leaves]
Shards are written under temporary names, while an older export stays as it is. Then, on one rank: the index, the single
file and the manifest of the older one go; the shards get their names; the index comes last. So at any time there is
either the older export, or the new one, or no index and no single file: then nothing there is taken for complete. A
single file is complete by its name alone, and takes the place of an older one at once.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from d9d.model_state.io.durable import flush_directory, write_json
from d9d.model_state.io.files import INDEX_NAME, SINGLE_NAME
from d9d.model_state.io.manifest import MANIFEST_NAME, write_manifest

__all__ = ["WrittenShard", "prepare_directory", "publish", "remove_shards", "temporary_name"]

_SHARD_NAME = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.tmp-rank\d+-shard-\d+\.safetensors|\.tmp-model\.(safetensors\.index|sha256)\.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """A file of tensors that is on disk under its temporary name.

    Attributes:
        name: The temporary name.
        tensors: Size in bytes of each tensor in it, by name.
        digest: Hexadecimal SHA-256 digest of the file; None if no manifest is asked for.
    """

    name: str
    tensors: Mapping[str, int]
    digest: str | None


def temporary_name(rank: int, index: int) -> str:
    """Return what a shard is called while it is written.

    Args:
        rank: Rank that writes it, among those that export together.
        index: Counts the shards of the rank from 0.
    """
    return f".tmp-rank{rank}-shard-{index}.safetensors"


def prepare_directory(directory: Path) -> None:
    """Create the directory of an export, and remove what a stopped one has left there. For one rank only."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if _TEMPORARY_NAME.fullmatch(path.name):
            path.unlink()


def remove_shards(directory: Path, shards: Sequence[WrittenShard]) -> None:
    """Remove the shards of an export that has failed, as far as that is possible."""
    for shard in shards:
        with contextlib.suppress(OSError):
            (directory / shard.name).unlink(missing_ok=True)


def publish(directory: Path, shards: Sequence[WrittenShard]) -> None:
    """Turn the shards of all ranks into a model state, in place of an older one. For one rank only.

    See [Note: what a stopped export leaves].

    Args:
        directory: Where the shards are.
        shards: All of them, in the order of their final numbers; at least one.

    Raises:
        OSError: Naming the path.
    """
    _check_visible(directory, shards)
    names = _final_names(len(shards))
    is_single = len(shards) == 1
    for name in [INDEX_NAME, MANIFEST_NAME] if is_single else [INDEX_NAME, SINGLE_NAME, MANIFEST_NAME]:
        (directory / name).unlink(missing_ok=True)
    flush_directory(directory)
    digests = {name: shard.digest for name, shard in zip(names, shards, strict=True) if shard.digest is not None}
    if digests:
        write_manifest(directory, digests)
    for name, shard in zip(names, shards, strict=True):
        (directory / shard.name).replace(directory / name)
    flush_directory(directory)
    if not is_single:
        write_json(directory / INDEX_NAME, _index(names, shards))
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


def _check_visible(directory: Path, shards: Sequence[WrittenShard]) -> None:
    missing = [shard.name for shard in shards if not (directory / shard.name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(shards)} shards that the ranks wrote to {directory} are not there, as seen from the "
            f"first rank: {', '.join(missing[:10])}. All ranks must write to one file system that they share."
        )
