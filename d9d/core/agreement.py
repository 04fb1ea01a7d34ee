"""Finds out at the start that ranks which must agree do not, instead of letting them wait for each other."""

import hashlib
import json
import re
from collections.abc import Mapping, Set
from typing import cast

from d9d.core.failures.report import spans
from d9d.core.participants import Participants

__all__ = ["agree_on"]

_MAX_SHOWN = 20
_MAX_CHARACTERS = 200
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def agree_on(participants: Participants, what: str, facts: Mapping[str, object], mend: str) -> None:
    """Refuse to go on if ranks have different facts. All ranks must call it; blocks the host.

    Ranks exchange a digest. Only where digests differ they exchange the facts.

    Args:
        participants: The ranks.
        what: What the facts are about, for the error.
        facts: By name; values that JSON does not have count by their text, without addresses. Nested mappings are compared
            entry by entry.
        mend: What to do about it, a sentence.

    Raises:
        ValueError: On all ranks, with the name of each fact that differs, and the values by rank.
    """
    own = _as_texts(facts, prefix="")
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(participants.gather(digest))) == 1:
        return
    differences = _differences(participants.gather(own))
    lines = [f"- {difference}" for difference in differences[:_MAX_SHOWN]]
    if len(differences) > len(lines):
        lines.append(f"- and {len(differences) - len(lines)} more")
    raise ValueError("\n".join([f"ranks do not agree on {what}:", *lines, mend]))


def _as_texts(facts: Mapping[str, object], prefix: str) -> dict[str, str]:
    """Return facts by dotted name, as JSON."""
    texts: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            texts |= _as_texts({str(key): each for key, each in value.items()}, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = json.dumps(value, default=_described)
    return texts


def _described(value: object) -> object:
    """Return what stands for a value that JSON does not have: the same on ranks that have the same."""
    if isinstance(value, Set):
        return sorted(_ADDRESS.sub("", repr(each)) for each in cast("Set[object]", value))
    return _ADDRESS.sub("", str(value))


def _differences(facts_of_ranks: list[dict[str, str]]) -> list[str]:
    names = dict.fromkeys(name for facts in facts_of_ranks for name in facts)
    differences: list[str] = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            ranks_by_value.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(
                f"{value[:_MAX_CHARACTERS]} on rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
                for value, ranks in ranks_by_value.items()
            )
            differences.append(f"{name}: {values}")
    return differences
