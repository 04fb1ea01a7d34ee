"""The checkpoints of a run in its folder: names, which are complete, which go.

[Note: complete or not there]
A checkpoint is written to ``save-<step>.partial``. Its commit record comes last, then it gets its name ``save-<step>``. At
every moment a process may be killed:

- without a record the folder is a leftover, which nobody takes for a checkpoint, and which the next save removes;
- with a record but without its name it is complete, and `CheckpointFolder.recover` gives it the name;
- a checkpoint that goes loses its record first.

One process does all this, rank 0, and tells the others.
"""

import contextlib
import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from d9d.checkpoint.record import RECORD_NAME, CommitRecord
from d9d.checkpoint.writer import sync_folder

__all__ = ["CheckpointFolder", "Probe", "SavedCheckpoint", "ignore_points"]

_NAME = re.compile(r"save-([0-9]+)")
_OTHER_NAMES = re.compile(r"save-[0-9]+\.(partial|replaced|removed)")

Probe = Callable[[str], None]
"""Called at each point of a save, by name: for tests that stop a process there."""


def ignore_points(point: str) -> None:
    """Do nothing at a point of a save."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    """Step after which it was written."""
    path: Path
    """Its folder."""
    record: CommitRecord
    """What its files must be."""


@final
class CheckpointFolder:
    """The checkpoints of a run. See [Note: complete or not there].

    Args:
        path: Folder of the run; it need not exist.
        logger: Where to tell what was left alone or could not be removed.
        probe: Called at points of a commit, for tests.
    """

    def __init__(self, path: Path, logger: logging.Logger, probe: Probe = ignore_points) -> None:
        self.path = path
        self._logger = logger
        self._probe = probe

    def begin(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint to, and remove what other saves have left.

        Raises:
            OSError: If that fails.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self._real_folders(_OTHER_NAMES):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = self.partial_path(step)
        partial.mkdir()
        return partial

    def partial_path(self, step: int) -> Path:
        """Return the folder that a checkpoint is written to."""
        return self.path / f"save-{step}.partial"

    def final_path(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        return self.path / f"save-{step}"

    def commit(self, record: CommitRecord) -> Path:
        """Make the checkpoint that was written complete, and give it its name, in place of one of the same step.

        Returns:
            Its folder.

        Raises:
            OSError: If that fails.
        """
        partial, final_path = self.partial_path(record.step), self.final_path(record.step)
        self._probe("before_commit")
        _write_record(partial, record)
        self._probe("after_record")
        replaced = final_path.with_name(f"{final_path.name}.replaced")
        if final_path.exists():
            final_path.rename(replaced)
        partial.rename(final_path)
        sync_folder(self.path)
        self._probe("after_commit")
        shutil.rmtree(replaced, ignore_errors=True)
        return final_path

    def recover(self) -> None:
        """Give checkpoints that are complete their names, where a save was killed before it could.

        Call it before the first look at a folder, where no save is in progress.
        """
        for path in self._real_folders(_OTHER_NAMES):
            final_path = path.with_suffix("")
            if path.suffix in (".partial", ".replaced") and not final_path.exists():
                with contextlib.suppress(OSError, ValueError):
                    CommitRecord.read(path)
                    path.rename(final_path)

    def complete(self) -> list[SavedCheckpoint]:
        """Return the complete checkpoints, oldest step first. Their files may be damaged all the same."""
        found: list[SavedCheckpoint] = []
        for path in self._real_folders(_NAME):
            match = _NAME.fullmatch(path.name)
            assert match is not None  # by this name it was found
            try:
                record = CommitRecord.read(path)
            except (OSError, ValueError) as error:
                self._logger.warning("%s is left alone, it is no complete checkpoint: %s", path, error)
                continue
            found.append(SavedCheckpoint(step=int(match.group(1)), path=path, record=record))
        return sorted(found, key=lambda saved: saved.step)

    def purge(self, num_to_keep: int | None, *, keep_every_steps: int | None = None, keep: Sequence[int] = ()) -> None:
        """Remove old checkpoints, never the newest. What cannot be removed is told and left.

        Args:
            num_to_keep: Newest ones to keep, at least 1; None keeps all.
            keep_every_steps: Those whose step is a multiple of it are kept, and not counted.
            keep: Steps whose checkpoints are kept, and not counted.
        """
        if num_to_keep is None:
            return
        if num_to_keep < 1:
            raise ValueError(f"num_to_keep is {num_to_keep}: at least 1 checkpoint stays.")
        self._probe("before_purge")
        old = [
            saved
            for saved in self.complete()
            if saved.step not in keep and (keep_every_steps is None or saved.step % keep_every_steps != 0)
        ]
        for saved in old[:-num_to_keep]:
            try:
                _remove(saved.path)
            except OSError as error:
                self._logger.warning("could not remove the old checkpoint %s: %s", saved.path, error)

    def _real_folders(self, pattern: re.Pattern[str]) -> list[Path]:
        """Return folders, not links to some, whose whole name fits."""
        if not self.path.is_dir():
            return []
        return sorted(
            path
            for path in self.path.iterdir()
            if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )


def _write_record(folder: Path, record: CommitRecord) -> None:
    temporary = folder / f"{RECORD_NAME}.tmp"
    with temporary.open("wb") as file:
        file.write(record.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / RECORD_NAME)
    sync_folder(folder)


def _remove(folder: Path) -> None:
    (folder / RECORD_NAME).unlink()
    removed = folder.with_name(f"{folder.name}.removed")
    folder.rename(removed)
    shutil.rmtree(removed)
