"""The checkpoints of a run in its folder: names, which are complete, which go.

[Note: complete or not there]
A checkpoint is written to ``save-<step>.partial``. Its commit record comes last, then it gets its name ``save-<step>``. At
every moment a process may be killed:

- without a record the folder is a leftover, which nobody takes for a checkpoint, and which the next save removes;
- with a record but without its name it is complete, and `CheckpointFolder.recover` gives it the name, in place of an older
  one of the same step;
- a checkpoint that goes loses its name first.

One process does all this, rank 0, and tells the others.

[Note: one job at a time]
A job that saves holds a lock of the folder: another one would remove what it is writing. Whoever only reads takes none, and sees
complete checkpoints alone. The lock is waited for: when a job is killed, its data loaders need some seconds to notice.
"""

import contextlib
import dataclasses
import errno
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Literal, final

from d9d.checkpoint.record import RECORD_NAME, CommitRecord
from d9d.checkpoint.writer import sync_folder
from d9d.core.directory_lock import DirectoryLock, is_of_others

__all__ = [
    "CheckpointFolder",
    "Probe",
    "SavedCheckpoint",
    "has_record",
    "ignore_points",
    "make_folder",
    "write_record",
]

_NAME = re.compile(r"save-(0|[1-9][0-9]*)")
_OTHER_NAMES = re.compile(r"save-(0|[1-9][0-9]*)\.(partial|replaced|removed)")

_LOCK_NAME = ".lock"
_LOCK_WAIT_S = 15.0

Probe = Callable[[str], None]
"""Called at each point of a save, by name: for tests that stop a process there."""


def ignore_points(point: str) -> None:
    """Do nothing at a point of a save."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was complete once."""

    step: int
    """Step after which it was written."""
    path: Path
    """Its folder."""
    record: CommitRecord | None
    """What its files must be; None if the record is damaged."""
    damage: str = ""
    """What is wrong with the record."""


@final
class CheckpointFolder:
    """The checkpoints of a run. See [Note: complete or not there].

    Args:
        path: Folder of the run; it need not exist.
        logger: Where to tell what was left alone or could not be removed.
        probe: Called at points of a commit, for tests.
        share_with_group: Let the group of the user into folders that are made, see `make_folder`.
    """

    def __init__(
        self, path: Path, logger: logging.Logger, probe: Probe = ignore_points, *, share_with_group: bool = False
    ) -> None:
        self.path = path
        self._share_with_group = share_with_group
        self._is_locked = False
        self.logger = logger
        """Where to tell what was left alone or went wrong."""
        self._probe = probe
        self._told: set[Path] = set()

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keep other jobs from saving here while the block runs. See [Note: one job at a time].

        Raises:
            OSError: If another job does.
        """
        if self._is_locked:
            yield
            return
        make_folder(self.path, share_with_group=self._share_with_group)
        lock = DirectoryLock(
            self.path / _LOCK_NAME,
            f"another job that saves checkpoints to {self.path}",
            "Wait for its end, or give this one another name (run.name).",
            wait_s=_LOCK_WAIT_S,
        )
        self._is_locked = True
        try:
            yield
        finally:
            self._is_locked = False
            lock.release()

    def begin(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint to, and remove what other saves have left.

        Raises:
            OSError: If that fails, another job saves here, or something else has the name of the checkpoint.
        """
        with self.locked():
            return self._begin(step)

    def remove_leftovers(self) -> None:
        """Remove what saves have left that were not completed. No save may be under way.

        Raises:
            OSError: If another job saves here, or one that is complete cannot get its name.
        """
        with self.locked():
            self.recover()
            for leftover in self._real_folders(_OTHER_NAMES):
                shutil.rmtree(leftover, ignore_errors=True)

    def _begin(self, step: int) -> Path:
        self.remove_leftovers()
        final_path, partial = self.final_path(step), self.partial_path(step)
        if final_path.is_symlink() or (final_path.exists() and not final_path.is_dir()):
            raise FileExistsError(f"{final_path} is no folder. Remove what has the name of the checkpoint.")
        make_folder(partial, share_with_group=self._share_with_group)
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
            OSError: If that fails, or files are not there.
        """
        partial = self.partial_path(record.step)
        if problems := record.size_problems(partial):
            raise OSError(f"{'; '.join(problems[:3])}. Is {self.path} on a file system that all ranks share?")
        self._probe("before_commit")
        sync_folder(partial)
        write_record(partial, record)
        self._probe("after_record")
        self._give_name(partial)
        self._probe("after_commit")
        return self.final_path(record.step)

    def _give_name(self, partial: Path) -> None:
        """Give a checkpoint with a record its name. Whatever is killed here, `recover` does the rest."""
        final_path = partial.with_suffix("")
        replaced = final_path.with_suffix(".replaced")
        if final_path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final_path.rename(replaced)
        partial.rename(final_path)
        sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def recover(self) -> None:
        """Give checkpoints that are complete their names, where a save was killed before it could.

        Call it before the first look at a folder. Where another job saves meanwhile, or this one may not write, it is left to
        others.

        Raises:
            OSError: If one cannot be renamed.
        """
        left = self._real_folders(_OTHER_NAMES)
        if not left:
            return  # a folder that may only be read need not be locked
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.locked())
            except OSError as error:
                if not is_of_others(error):
                    raise
                self.logger.info("left to another job: %s", error)
                return
            self._recover(left)

    def _recover(self, left: Sequence[Path]) -> None:
        for path in left:
            if path.suffix == ".partial" and has_record(path):
                self._give_name(path)
            elif path.suffix == ".replaced" and has_record(path) and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))

    def complete(self) -> list[SavedCheckpoint]:
        """Return the complete checkpoints, oldest step first. Records and files may have been damaged since."""
        found: list[SavedCheckpoint] = []
        for path in self._real_folders(_NAME):
            step = int(path.name.removeprefix("save-"))
            try:
                record = CommitRecord.read(path)
            except FileNotFoundError:
                if path not in self._told:
                    self.logger.warning("%s is left alone: it has no commit record, so it is no checkpoint", path)
                self._told.add(path)
                continue
            except (OSError, ValueError) as error:
                found.append(SavedCheckpoint(step=step, path=path, record=None, damage=str(error)))
                continue
            if record.step != step:
                damage = f"{path} was written as the checkpoint of step {record.step}, and has another name"
                found.append(SavedCheckpoint(step=step, path=path, record=None, damage=damage))
            else:
                found.append(SavedCheckpoint(step=step, path=path, record=record))
        return sorted(found, key=lambda saved: saved.step)

    def best_steps(self, step: int, metric: str, mode: Literal["min", "max"], num_best: int) -> list[int]:
        """Return the steps of the checkpoints with the best values of a metric, best first; of equal ones the older ones.

        Checkpoints without a value, or with one that is no number, are never among them.

        Args:
            step: Only those up to this step count.
            metric: Name of the value in the commit records.
            mode: Whether small or large values are good.
            num_best: How many at most.
        """
        values = {
            saved.step: saved.record.metrics[metric]
            for saved in self.complete()
            if saved.record is not None and saved.step <= step and metric in saved.record.metrics
        }
        sign = 1 if mode == "min" else -1
        ranked = sorted((sign * value, step) for step, value in values.items() if not math.isnan(value))
        return [step for _, step in ranked[:num_best]]

    def purge(
        self,
        step: int,
        num_to_keep: int | None,
        *,
        keep_every_steps: int | None = None,
        keep: Sequence[int] = (),
        spare: Collection[int] = (),
    ) -> None:
        """Remove old checkpoints after a new one. What cannot be removed is told and left.

        Later ones, which a run has that went back to an older checkpoint, and damaged ones are neither removed nor counted.

        Args:
            step: Step of the new one, which stays.
            num_to_keep: Newest ones to keep, with the new one, at least 1; None keeps all.
            keep_every_steps: Those whose step is a multiple of it are kept, and not counted.
            keep: Steps whose checkpoints are kept, and not counted.
            spare: Steps whose checkpoints are kept, and counted where they are among the newest.
        """
        if num_to_keep is None:
            return
        if num_to_keep < 1:
            raise ValueError(f"num_to_keep is {num_to_keep}: at least 1 checkpoint stays.")
        self._probe("before_purge")
        old = [
            saved
            for saved in self.complete()
            if saved.record is not None
            and saved.step < step
            and saved.step not in keep
            and (keep_every_steps is None or saved.step % keep_every_steps != 0)
        ]
        is_counted = step not in keep and (keep_every_steps is None or step % keep_every_steps != 0)
        num_others = num_to_keep - 1 if is_counted else num_to_keep
        for saved in old[: max(len(old) - num_others, 0)]:
            if saved.step in spare:
                continue
            try:
                self._remove(saved.path)
            except OSError as error:
                self.logger.warning("could not remove the old checkpoint %s: %s", saved.path, error)

    def _remove(self, path: Path) -> None:
        removed = path.with_suffix(".removed")
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        sync_folder(self.path)
        shutil.rmtree(removed)

    def _real_folders(self, pattern: re.Pattern[str]) -> list[Path]:
        """Return folders, not links to some, whose whole name fits."""
        if not self.path.is_dir():
            return []
        return sorted(
            path
            for path in self.path.iterdir()
            if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )


def make_folder(path: Path, *, share_with_group: bool) -> None:
    """Make a folder that its owner alone may enter, or also the owner's group; one that is there stays as it is.

    Args:
        path: The folder; those above it are made as usual.
        share_with_group: Let the group read and write in it, and give it what is made there.

    Raises:
        OSError: If it cannot be made.
    """
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # by another rank, or what has its name is no folder
        path.mkdir(mode=0o700)
        if share_with_group:
            path.chmod(0o2770)
        sync_folder(path.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def write_record(folder: Path, record: CommitRecord) -> None:
    """Write the record that makes a checkpoint complete, and wait until it is on the disk."""
    temporary = folder / f"{RECORD_NAME}.tmp"
    with temporary.open("wb") as file:
        file.write(record.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / RECORD_NAME)
    sync_folder(folder)


def has_record(folder: Path) -> bool:
    """Tell whether a folder holds a complete checkpoint, whatever its name."""
    try:
        CommitRecord.read(folder)
    except (OSError, ValueError):
        return False
    return True
