"""Names: patterns of dotted ones, the nearest ones, and repeated ones shown as one, ``blocks.{0-11}.attn.q``."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Hashable, Iterable, Mapping, Sequence


def matches(name: str, pattern: str) -> bool:
    """Match a dotted name part by part, so that ``blocks.*`` is each block, but nothing inside of it."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def nearest(pattern: str, names: Sequence[str]) -> str:
    """Name what a pattern without a match may have meant, as the end of a message."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return f"; the nearest are {', '.join(map(repr, near))}" if near else ""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Ask for the nearest of some known words, as a sentence behind others; empty if none is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameGroup:
    """Dotted names that differ in numbers only."""

    name: str
    """The names as one, with the numbers in braces."""
    members: tuple[str, ...]
    """The names themselves, in order."""


def collapse_numbers(keys: Mapping[str, Hashable]) -> list[NameGroup]:
    """Put names together that differ in one number at a time and have equal keys, in order of first appearance.

    Args:
        keys: By dotted name, what must be equal within a group.
    """
    rows = [(tuple(name.split(".")), key, (name,)) for name, key in keys.items()]
    for position in range(max((len(parts) for parts, _, _ in rows), default=0)):
        groups: dict[Hashable, list[tuple[tuple[str, ...], Hashable, tuple[str, ...]]]] = {}
        for row in rows:
            parts, key, _ = row
            has_number = position < len(parts) and parts[position].isdigit()
            rest = (*parts[:position], None, *parts[position + 1 :]) if has_number else parts
            groups.setdefault((rest, key), []).append(row)
        rows = [_merge(position, group) if len(group) > 1 else group[0] for group in groups.values()]
    return [NameGroup(name=".".join(parts), members=members) for parts, _, members in rows]


def _merge(
    position: int, rows: list[tuple[tuple[str, ...], Hashable, tuple[str, ...]]]
) -> tuple[tuple[str, ...], Hashable, tuple[str, ...]]:
    parts, key, _ = rows[0]
    numbers = sorted(int(row[0][position]) for row in rows)
    merged = (*parts[:position], f"{{{_ranges(numbers)}}}", *parts[position + 1 :])
    return merged, key, tuple(member for row in rows for member in row[2])


def _ranges(numbers: list[int]) -> str:
    """Write ascending numbers as ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
