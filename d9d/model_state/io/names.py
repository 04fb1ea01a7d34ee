"""Names from files in error messages: a few of many, and escaped, as a file may give its tensors any name."""

from collections.abc import Collection, Iterable

from d9d.model_state.mapper.names import NearestNames

__all__ = ["list_names", "list_with_nearest"]

_NUM_SHOWN = 10


def list_names(names: Iterable[str]) -> str:
    """Return the first names in order, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(repr(name) for name in ordered[:_NUM_SHOWN]) + _more(len(ordered))


def list_with_nearest(names: Iterable[str], known: Collection[str]) -> str:
    """Return the first names in order, each with the known name that is most like it."""
    ordered = sorted(names)
    nearest = NearestNames(known)
    shown = [f"{name!r}{_escaped(nearest.hint(name))}" for name in ordered[:_NUM_SHOWN]]
    return ", ".join(shown) + _more(len(ordered))


def _more(num_names: int) -> str:
    return f" and {num_names - _NUM_SHOWN} more" if num_names > _NUM_SHOWN else ""


def _escaped(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()
