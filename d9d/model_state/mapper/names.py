"""Names of tensors in error messages: lists of bounded length, and what may have been meant instead.

They are escaped, as a file may give its tensors any name.
"""

import difflib
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

__all__ = ["NearestNames", "capped", "distinct", "listed"]

T = TypeVar("T")

_MAX_LISTED = 10
_MAX_COMPARED = 32


def capped(
    items: Sequence[T], limit: int = _MAX_LISTED, describe: Callable[[T], str] = str, *, by_line: bool = False
) -> str:
    """Return descriptions of items, at most of some of them, and how many more there are.

    Args:
        items: In the order in which they are shown.
        limit: How many are shown at most.
        describe: Called for those that are shown only.
        by_line: Whether each has a line of its own; else there are commas between them.
    """
    comma, space = ("\n", "\n") if by_line else (", ", " ")
    shown = comma.join(map(describe, items[:limit]))
    return shown if len(items) <= limit else f"{shown}{space}and {len(items) - limit} more"


def listed(names: Iterable[str], limit: int = _MAX_LISTED) -> str:
    """Return names in quotes and in order, at most some of them."""
    return capped(sorted(names), limit, repr)


class NearestNames:
    """Finds the names that are most like a misspelt one, also among tens of thousands."""

    def __init__(self, candidates: Collection[str]) -> None:
        """Take the names that there are."""
        self._candidates = sorted(candidates)
        self._trigrams: list[frozenset[str]] | None = None

    def hint(self, name: str) -> str:
        """Return a remark in parentheses, with a space before it; empty if no name is like this one."""
        if self._trigrams is None:
            self._trigrams = [_trigrams(candidate) for candidate in self._candidates]
        # difflib takes 100 microseconds a pair, so that it sees the few that share most of their letters.
        own = _trigrams(name)
        shared = [len(own & trigrams) / len(own | trigrams) for trigrams in self._trigrams]
        best = heapq.nlargest(_MAX_COMPARED, range(len(shared)), key=shared.__getitem__)
        near = difflib.get_close_matches(name, [self._candidates[index] for index in best], n=1)
        return f" (nearest: {near[0]!r})" if near else ""

    def described(self, names: Iterable[str], limit: int = _MAX_LISTED) -> str:
        """Return names as `listed` does, each with its nearest one."""
        return capped(sorted(names), limit, lambda name: f"{name!r}{self.hint(name)}")


def _trigrams(name: str) -> frozenset[str]:
    padded = f"  {name} "
    return frozenset(padded[start : start + 3] for start in range(len(padded) - 2))


def distinct(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return names as they are.

    Raises:
        TypeError: If it is one text.
        ValueError: If there are none, or one is there twice.
    """
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list of names, not the text {names!r}.")
    names = tuple(names)
    twice = {name for name, count in Counter(names).items() if count > 1}
    if not names or twice:
        wrong = f"{listed(twice)} more than once" if twice else "none"
        raise ValueError(f"{what} must be different names, at least one; there is {wrong}.")
    return names
