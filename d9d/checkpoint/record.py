"""The commit record of a checkpoint: what makes it complete, and what its files must be.

It is written last, by one rank, when all files are on the disk. A folder without one is no checkpoint.
"""

import dataclasses
import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from d9d.checkpoint.digest import FileDigest, digest_file

__all__ = ["RECORD_NAME", "CommitRecord", "is_plain_name"]

RECORD_NAME = "commit.json"
"""Name of the commit record in the folder of a checkpoint."""

_VERSION = 3
_MAX_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """What the files of a complete checkpoint are."""

    step: int
    """Step after which the checkpoint was written."""
    num_ranks: int
    """Ranks of the job that wrote it."""
    files: Mapping[str, FileDigest]
    """All files but the record, by name."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Values that tell how good the checkpoint is, by name."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the record."""
        return sum(digest.size_bytes for digest in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the content of the file: the one way to write these values, with a digest of itself."""
        content = {
            "version": _VERSION,
            "step": self.step,
            "num_ranks": self.num_ranks,
            "metrics": {name: repr(value) for name, value in sorted(self.metrics.items())},
            "files": {name: [digest.size_bytes, digest.xxh3] for name, digest in sorted(self.files.items())},
        }
        text = json.dumps(content, separators=(",", ":"))
        return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode()

    @classmethod
    def read(cls, folder: Path) -> "CommitRecord":
        """Read the record of a checkpoint.

        Raises:
            FileNotFoundError: If there is none: the folder is no complete checkpoint.
            ValueError: If it is damaged, or of another version.
        """
        path = folder / RECORD_NAME
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} is damaged: it is too large")
        data = path.read_bytes()
        try:
            text, digest, rest = data.decode().split("\n")
            if rest or hashlib.sha256(text.encode()).hexdigest() != digest:
                raise ValueError("its digest is another one")
            record = cls._parse(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return record

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> "CommitRecord":
        if content["version"] != _VERSION:
            raise ValueError(f"it is of version {content['version']}, and this release reads version {_VERSION}")
        files = {
            name: FileDigest(size_bytes=int(size), xxh3=str(xxh3))
            for name, (size, xxh3) in cast(dict[str, tuple[int, str]], content["files"]).items()
        }
        strange = [name for name in files if not is_plain_name(name) or name == RECORD_NAME]
        if strange:
            raise ValueError(f"it names files outside of the checkpoint: {strange}")
        metrics = {str(name): float(value) for name, value in content["metrics"].items()}
        return cls(step=int(content["step"]), num_ranks=int(content["num_ranks"]), files=files, metrics=metrics)

    def size_problems(self, folder: Path) -> list[str]:
        """Return what is wrong with names and sizes of the files, without reading them."""
        problems: list[str] = []
        for name, digest in self.files.items():
            path = folder / name
            try:
                found = path.lstat()
            except FileNotFoundError:
                problems.append(f"{path} is missing")
                continue
            except OSError as error:
                problems.append(f"{path} cannot be looked at: {error.strerror or error}")
                continue
            if not stat.S_ISREG(found.st_mode):
                problems.append(f"{path} is missing: a link or the like has its name")
            elif found.st_size != digest.size_bytes:
                problems.append(f"{path} has {found.st_size} bytes, and {digest.size_bytes} were written")
        return problems

    def content_problems(self, folder: Path, names: list[str]) -> list[str]:
        """Read some of the files, and return what is wrong with their content."""
        problems: list[str] = []
        for name in names:
            try:
                digest = digest_file(folder / name)
            except OSError as error:
                problems.append(f"{folder / name} cannot be read: {error.strerror or error}")
                continue
            if digest != self.files[name]:
                problems.append(f"{folder / name} is damaged: its content is not what was written")
        return problems


def is_plain_name(name: str) -> bool:
    """Tell whether a name is that of a file in the folder that it is looked up in."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")
