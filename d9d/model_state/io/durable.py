"""Files that are on disk when a function returns, and errors that say which file it was."""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path

__all__ = ["flush_directory", "naming_path", "write_json"]

_TEMPORARY_PREFIX = ".tmp-"


@contextlib.contextmanager
def naming_path(path: Path) -> Generator[None]:
    """Add a path to operating system errors that do not name any, as those of writes into open files."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def flush_directory(directory: Path) -> None:
    """Wait until new, renamed and removed names in a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with naming_path(directory):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file that is there in full or not at all, in place of an older one. Returns when it is on disk."""
    temporary = path.with_name(_TEMPORARY_PREFIX + path.name)
    with naming_path(temporary), temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush_directory(path.parent)
