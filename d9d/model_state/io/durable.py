"""Files that are on disk when a function returns, and errors that say which file it was."""

import contextlib
import json
import os
import secrets
from collections.abc import Generator
from pathlib import Path

__all__ = ["flush_directory", "json_bytes", "naming_path", "write_durably"]

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


def json_bytes(value: object) -> bytes:
    """Return a value as the content of a JSON file that people can read."""
    return json.dumps(value, indent=2).encode() + b"\n"


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there in full or not at all, in place of an older one. Returns when it is on disk."""
    # Of each write its own: two that replace one file must not write into each other's.
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    with naming_path(temporary), temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush_directory(path.parent)
