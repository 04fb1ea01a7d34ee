"""Look at checkpoints without a job: what there is, what is wrong with it, what it holds, how two differ."""

import dataclasses
import fnmatch
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from d9d.checkpoint.folder import CheckpointFolder, SavedCheckpoint
from d9d.checkpoint.json_values import to_json
from d9d.checkpoint.load import read_flat, read_metadata, verify_checkpoint
from d9d.checkpoint.record import RECORD_NAME
from d9d.checkpoint.single import CheckpointPath

__all__ = ["Difference", "describe_checkpoint", "differences", "is_checkpoint", "list_checkpoints", "verify_folder"]

_MAX_VALUE_CHARS = 80
_OF_UNFINISHED = {".partial", ".replaced", ".removed"}
"""What names of checkpoints end with while they come or go."""

_QUIET = logging.getLogger(__name__)


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is one checkpoint, rather than a folder of some."""
    return (path / RECORD_NAME).is_file()


def list_checkpoints(folder: Path) -> list[str]:
    """Return a line for each checkpoint of a folder, oldest first, and one for each thing that is none."""
    saved = _complete(folder)
    lines = [_line(checkpoint) for checkpoint in saved]
    paths = {checkpoint.path for checkpoint in saved}
    others = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and path not in paths]
    return lines + [f"{name:16} no complete checkpoint" for name in others if name.startswith("save-")]


def _complete(folder: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run and those of names that callbacks chose, oldest step first. Links are passed over."""
    of_run = CheckpointFolder(folder, _QUIET).complete()
    known = {saved.path for saved in of_run}
    others = [
        CheckpointPath(path, _QUIET).complete()
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path not in known and not path.is_symlink() and path.suffix not in _OF_UNFINISHED and is_checkpoint(path)
    ]
    return sorted([*of_run, *others], key=lambda saved: saved.step)


def _line(saved: SavedCheckpoint) -> str:
    if saved.record is None:
        return f"{saved.path.name:16} damaged: {saved.damage}"
    written = time.localtime((saved.path / RECORD_NAME).stat().st_mtime)
    return (
        f"{saved.path.name:16} step {saved.step:>9,}  {_size(saved.record.size_bytes):>9}  {saved.record.num_ranks:>5} ranks  "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', written)}"
    )


def verify_folder(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Read the files of a checkpoint, or of all in a folder, and yield what is wrong with each, oldest first."""
    if not is_checkpoint(path):
        found = _complete(path)
    else:  # of the names that a run gives, the step is held against the record too
        of_run = CheckpointFolder(path.parent, _QUIET).complete()
        found = [saved for saved in of_run if saved.path.name == path.name] or [CheckpointPath(path, _QUIET).complete()]
    for saved in found:
        yield saved.path, verify_checkpoint(saved)


def describe_checkpoint(path: Path, pattern: str = "*") -> list[str]:
    """Return a line for each tensor and value of a checkpoint whose name fits a pattern.

    Raises:
        ValueError: If it is damaged.
    """
    metadata = read_metadata(path)
    lines: list[str] = []
    for name in sorted(fnmatch.filter(metadata.state_dict_metadata, pattern)):
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            parts = f" in {len(entry.chunks)} parts" if len(entry.chunks) > 1 else ""
            num_bytes = entry.size.numel() * entry.properties.dtype.itemsize
            lines.append(f"{name}  {dtype} {list(entry.size)}  {_size(num_bytes)}{parts}")
        else:
            lines.append(f"{name}  = {_short(_read(path, metadata, name))}")
    return lines


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two checkpoints differ in one name."""

    name: str
    text: str


def differences(first: Path, second: Path, pattern: str = "*") -> Iterator[Difference]:
    """Compare two checkpoints, whatever meshes they were written on; memory holds one pair of tensors.

    Raises:
        ValueError: If one is damaged.
    """
    metadata = {path: read_metadata(path) for path in (first, second)}
    names = {name for of_one in metadata.values() for name in of_one.state_dict_metadata}
    for name in sorted(fnmatch.filter(names, pattern)):
        where = [path for path in (first, second) if name in metadata[path].state_dict_metadata]
        if len(where) == 1:
            yield Difference(name=name, text=f"only in {where[0]}")
            continue
        one, other = (_read(path, metadata[path], name) for path in (first, second))
        text = _difference(one, other)
        if text is not None:
            yield Difference(name=name, text=text)


# Any in this section: a checkpoint holds tensors, and values of all kinds.
def _difference(one: Any, other: Any) -> str | None:  # noqa: ANN401
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        is_same = not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor)
        return None if is_same and to_json(one, "") == to_json(other, "") else f"{_short(one)} and {_short(other)}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    differs = (_bytes_of(one) != _bytes_of(other)).any(-1)
    num_different = int(differs.sum())
    if num_different == 0:
        return None
    text = f"{num_different:,} of {one.numel():,} elements differ"
    if not one.dtype.is_floating_point:
        return text
    distances = (one.double() - other.double()).abs().reshape(-1)[differs]
    return f"{text}, by up to {float(distances.nan_to_num(nan=math.inf).max()):.3g}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, so that nothing is rounded and NaN equals NaN."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _read(path: Path, metadata: Metadata, name: str) -> Any:  # noqa: ANN401
    entry = metadata.state_dict_metadata[name]
    room = torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
    return read_flat(path, {name: room}, metadata)[name]


def _short(value: object) -> str:
    text = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
