"""Errors of the operating system in other words, of the same kind, number and path."""

__all__ = ["reason_of", "reworded"]


def reworded(error: OSError, reason: str) -> OSError:
    """Return an error of the same number, thus of the same class, and of the same path, with another reason.

    Args:
        error: What the system has said.
        reason: In place of what `reason_of` returns; the number and the path go around it.
    """
    if error.errno is None:
        return type(error)(reason)
    return OSError(error.errno, reason, error.filename)


def reason_of(error: OSError) -> str:
    """Return what an error says beside its number and path."""
    return str(error) if error.errno is None else str(error.strerror)
