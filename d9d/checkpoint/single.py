"""One checkpoint at a path of its own, such as those that callbacks name: how it gets there, is replaced, and goes.

[Note: unfinished checkpoints]
A checkpoint is written below ``.unfinished/`` beside its path, where no pattern of names finds it. Its commit record comes
last, then it gets its name. What had the name before stands beside it as ``<stem>.replaced<suffix>`` for the moment between
two renames, so that a job which is killed there still has a complete checkpoint, under a name that those who look for
``last*.ckpt`` find too. One that goes loses its name first: it is removed below ``.unfinished/``.

One process does all this, rank 0, and tells the others. Another job that only reads may find a complete checkpoint without its
name and give it that. Who gives names holds a lock meanwhile, since two that rename the same folders would lose one of them.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import final

from d9d.checkpoint.folder import Probe, SavedCheckpoint, has_record, ignore_points, write_record
from d9d.checkpoint.record import RECORD_NAME, CommitRecord
from d9d.checkpoint.writer import sync_folder
from d9d.core.directory_lock import DirectoryLock, is_of_others
from d9d.core.module_names import did_you_mean

__all__ = ["CheckpointPath"]

_LOCK_WAIT_S = 15.0

_STALE_S = 24 * 3600.0
"""Age of what other saves have left unfinished before it is removed: they may still be running until then."""


@final
class CheckpointPath:
    """A checkpoint at a path. See [Note: unfinished checkpoints].

    Args:
        path: Its folder; it need not exist.
        logger: Where to tell what was left alone or could not be removed.
        probe: Called at points of a commit, for tests.
    """

    def __init__(self, path: Path, logger: logging.Logger, probe: Probe = ignore_points) -> None:
        self._path = path
        self.logger = logger
        """Where to tell what was left alone or went wrong."""
        self._probe = probe
        self._unfinished = path.parent / ".unfinished"
        self._partial = self._unfinished / f"{path.name}.partial"
        self._removed = self._unfinished / f"{path.name}.removed"
        self._replaced = path.with_name(f"{path.stem}.replaced{path.suffix}")
        self._lock = path.with_name(f".{path.name}.lock")  # not in a folder that another save may remove

    def partial_path(self, step: int) -> Path:  # where it is does not depend on the step
        """Return the folder that the checkpoint is written to."""
        return self._partial

    def final_path(self, step: int) -> Path:
        """Return the folder of the complete checkpoint."""
        return self._path

    def begin(self, step: int) -> Path:
        """Make an empty folder to write to, and remove what killed saves have left.

        Raises:
            OSError: If that fails, or something that is no checkpoint has the path.
        """
        self._recover()
        self._refuse_other_folder()
        if not self._unfinished.is_dir():
            self._unfinished.mkdir(parents=True, exist_ok=True)
            sync_folder(self._path.parent)
        for leftover in (self._partial, self._removed, *self._stale()):
            shutil.rmtree(leftover, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self._partial

    def _refuse_other_folder(self) -> None:
        if self._path.is_dir() and not self._path.is_symlink() and not _is_checkpoint(self._path):
            raise FileExistsError(
                f"{self._path} is a folder without a commit record, so no checkpoint. Choose another path."
            )

    def _stale(self) -> list[Path]:
        """Return what was left long ago and is no complete checkpoint that waits for its name."""
        oldest = time.time() - _STALE_S
        return [
            path
            for path in self._unfinished.iterdir()
            if path.is_dir()
            and not path.is_symlink()
            and path.stat().st_mtime < oldest
            and (path.suffix == ".removed" or not has_record(path))
        ]

    def commit(self, record: CommitRecord) -> Path:
        """Make the checkpoint that was written complete, and give it its path, in place of what has it.

        Returns:
            Its folder.

        Raises:
            OSError: If that fails, or files are not there.
        """
        if problems := record.size_problems(self._partial):
            raise OSError(f"{'; '.join(problems[:3])}. Is {self._path} on a file system that all ranks share?")
        self._probe("before_commit")
        sync_folder(self._partial)
        write_record(self._partial, record)
        self._probe("after_record")
        with self._naming():
            if self._partial.exists():
                self._give_name()
            elif not self._has_name(record):  # a reader may have given it
                raise FileNotFoundError(
                    f"{self._partial} is gone before it was renamed to {self._path}. Does another job save to that path?"
                )
        self._remove_replaced()
        self._probe("after_commit")
        return self._path

    def _has_name(self, record: CommitRecord) -> bool:
        try:
            return CommitRecord.read(self._path).to_bytes() == record.to_bytes()
        except (OSError, ValueError):
            return False

    @contextlib.contextmanager
    def _naming(self) -> Generator[None]:
        """Let this process alone rename while the block runs. Nothing that takes long belongs there."""
        lock = DirectoryLock(
            self._lock,
            f"another job that gives {self._path} its name",
            "Try again when it has ended.",
            wait_s=_LOCK_WAIT_S,
        )
        try:
            yield
        finally:
            lock.release()

    def _give_name(self) -> None:
        """Give a checkpoint with a record its path. Whatever is killed here, `recover` does the rest."""
        self._refuse_other_folder()
        if self._path.is_symlink():
            self._path.unlink()
        elif self._path.exists():
            self._hide_replaced()
            self._path.rename(self._replaced)
        self._probe("between_names")
        self._partial.rename(self._path)
        sync_folder(self._path.parent)
        self._hide_replaced()

    def _hide_replaced(self) -> None:
        """Take the name from what was replaced, before a part of it is removed. What fails is left to the next save."""
        _remove_real(self._removed)
        with contextlib.suppress(OSError):
            self._replaced.rename(self._removed)

    def _remove_replaced(self) -> None:
        self._probe("before_removal")
        _remove_real(self._removed)
        with contextlib.suppress(OSError):
            self._unfinished.rmdir()  # unless others save beside it

    def recover(self) -> None:
        """Let the path have a complete checkpoint, where a save was killed before it could give it.

        Call it before the first look at the path. Where the folder may not be written to, what is there stays as it is.

        Raises:
            OSError: If one cannot be renamed.
        """
        try:
            self._recover()
        except OSError as error:
            if not is_of_others(error):
                raise
            self.logger.info("left to another job: %s", error)

    def _recover(self) -> None:
        if not (self._is_complete_without_name() or self._is_replaced_by_nothing()):
            return  # a folder that may only be read need not be locked
        with self._naming():
            if self._is_complete_without_name():
                self._give_name()
            elif self._is_replaced_by_nothing():
                self._replaced.rename(self._path)
        self._remove_replaced()

    def _is_complete_without_name(self) -> bool:
        return has_record(self._partial) and not self._partial.is_symlink()

    def _is_replaced_by_nothing(self) -> bool:
        return not self._path.exists() and not self._path.is_symlink() and has_record(self._replaced)

    def complete(self) -> SavedCheckpoint:
        """Return the checkpoint. Its record and files may have been damaged since.

        Raises:
            FileNotFoundError: If the path has none.
        """
        try:
            record = CommitRecord.read(self._path)
        except FileNotFoundError as error:
            if not self._path.exists():
                raise no_checkpoint(self._path) from error
            raise FileNotFoundError(
                f"{self._path} is no checkpoint: it has no {RECORD_NAME}, which is written when a checkpoint is complete"
            ) from error
        except (OSError, ValueError) as error:
            return SavedCheckpoint(step=0, path=self._path, record=None, damage=str(error))
        return SavedCheckpoint(step=record.step, path=self._path, record=record)

    def remove(self) -> None:
        """Remove the checkpoint. Of a link the link goes; what is no checkpoint stays. What fails is told, not raised."""
        try:
            if self._path.is_symlink():
                self._path.unlink()
            elif self._path.is_dir() and _is_checkpoint(self._path):
                self._unfinished.mkdir(exist_ok=True)
                shutil.rmtree(self._removed, ignore_errors=True)
                self._path.rename(self._removed)
                sync_folder(self._path.parent)
                shutil.rmtree(self._removed)
                with contextlib.suppress(OSError):
                    self._unfinished.rmdir()
            elif self._path.exists():
                self.logger.warning(
                    "%s is left alone: it has no commit record, so nothing here has written it", self._path
                )
        except OSError as error:
            self.logger.warning("could not remove the checkpoint %s: %s", self._path, error)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / RECORD_NAME).is_file()


def _remove_real(path: Path) -> None:
    """Remove what was replaced: a checkpoint, or a file that had its path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def no_checkpoint(path: Path) -> FileNotFoundError:
    """Return the error of a path at which nothing is, which asks for the nearest name beside it."""
    folder = path.absolute().parent
    beside = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return FileNotFoundError(f"there is no checkpoint {path}.{did_you_mean(path.name, beside)}")
