"""Lets one export, or one job that saves checkpoints, at a time write to a directory.

[Note: owners that were killed]
The lock is the operating system's, on a file in the directory. It is free as soon as the process that took it has ended, in
whatever way, with the children that it has forked: what a killed process leaves keeps no other one out. A file system that has
no locks is used without. The group may write to the file where it may write to the directory, so that what a killed process
leaves keeps no member of it out.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, final

__all__ = ["DirectoryLock", "is_of_others"]

_MAX_OWNER_CHARS = 200
_WITHOUT_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
_GROUP_MAY_WRITE = stat.S_IRGRP | stat.S_IWGRP
_POLL_S = 0.1


@final
class DirectoryLock:
    """The right to write to a directory, until it is released or the process ends. See [Note: owners that were killed].

    Args:
        path: File in the directory that says, while the lock is held, which process holds it.
        what: What is in progress meanwhile, for the error of others.
        mend: What they can do about it: a sentence.
        wait_s: How long to wait for the one that holds it, in seconds.
        make_directory: Makes the directory where it is not there. Called at each try, as the one that holds the lock may
            remove the directory at its end.

    Raises:
        OSError: Something else holds it, in this process or another one, on any machine; or the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        mend: str,
        *,
        wait_s: float = 0.0,
        make_directory: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        end_s = time.monotonic() + wait_s
        while (file := _locked(path, make_directory)) is None:
            if time.monotonic() >= end_s:
                raise BlockingIOError(f"{what} is in progress, led by {_owner(path)}. {mend}")
            time.sleep(_POLL_S)
        self._file: TextIO = file

    def release(self) -> None:
        """Let others have it. Further calls do nothing."""
        if not self._file.closed:
            # While the lock is held, the file is nobody else's. What cannot be removed is taken over by the next owner.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()


def is_of_others(error: OSError) -> bool:
    """Tell whether an error means that a directory is another one's to write to: it has the lock, or this one may not."""
    return isinstance(error, BlockingIOError) or error.errno in _NOT_WRITABLE


def _share(file: TextIO, directory: Path) -> None:
    """Let the group write to the file if it may write to the directory, whatever the umask."""
    mode = os.fstat(file.fileno()).st_mode
    if directory.stat().st_mode & stat.S_IWGRP and mode & _GROUP_MAY_WRITE != _GROUP_MAY_WRITE:
        with contextlib.suppress(PermissionError):  # another one's file
            os.fchmod(file.fileno(), stat.S_IMODE(mode) | _GROUP_MAY_WRITE)


def _locked(path: Path, make_directory: Callable[[], None] | None) -> TextIO | None:
    """Return the file with its lock, or None where something else has it or has just removed the directory."""
    while True:
        try:
            if make_directory is not None:
                make_directory()
            file = path.open("a+", encoding="utf-8")
        except FileNotFoundError:
            if make_directory is None:
                raise
            return None
        try:
            is_ours = _lock_open_file(file)
            if is_ours and _is_at(file, path):
                _share(file, path.parent)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        if not is_ours:
            return None
        # Whoever had it has ended since, and has removed the file.


def _lock_open_file(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_OWNER_CHARS).strip() or "a process that has not said which"
    except FileNotFoundError:
        return "a process that has just ended"
