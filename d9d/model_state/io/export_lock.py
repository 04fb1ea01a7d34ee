"""Lets one export at a time write to a directory.

[Note: exports that were killed]
The lock is the operating system's, on a file in the directory. It is free as soon as the process that took it has ended, in
whatever way, so what a killed export leaves keeps no other one out. A file system that has no locks is used without: then
two exports at once still do not mix, since the names of their shards differ, but one removes the shards of the other, which
fails.
"""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO, final

__all__ = ["LOCK_NAME", "DirectoryLock"]

LOCK_NAME = ".tmp-export.lock"
"""File that says, while an export is in progress, which process leads it."""

_MAX_HOLDER_CHARS = 200
_WITHOUT_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}


@final
class DirectoryLock:
    """The right to export into a directory, until it is released or the process ends. See [Note: exports that were killed].

    Args:
        directory: Where the export goes.

    Raises:
        OSError: Another export has it, of this process or another one, on any machine; or the file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._file = _lock(self._path)

    def release(self) -> None:
        """Let others export. Further calls do nothing."""
        if not self._file.closed:
            # While the lock is held, the file is nobody else's. What cannot be removed is taken over by the next export.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()


def _lock(path: Path) -> TextIO:
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock_open_file(file, path)
            if _is_at(file, path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        # The export that had it has ended since, and has removed the file.
        file.close()


def _lock_open_file(file: TextIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(_MAX_HOLDER_CHARS).strip() or "a process that has not said which"
        raise OSError(
            f"another export into {path.parent} is in progress, led by {holder}. Wait until it is complete (for one in "
            f"the background, call its wait() first), or export into another directory."
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
