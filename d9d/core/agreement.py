"""Finds out at the start that ranks which must agree do not, instead of letting them wait for each other."""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Set
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from d9d.core.failures.report import spans
from d9d.core.participants import Participants

__all__ = ["agree_on", "name_of"]

_MAX_SHOWN = 20
_MAX_CHARACTERS = 200
_NUM_BEFORE = 50
"""How much of a long value is shown before the first difference, in characters."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def agree_on(participants: Participants, what: str, facts: Mapping[str, object], mend: str) -> None:
    """Refuse to go on if ranks have different facts. All ranks must call it; blocks the host.

    Ranks exchange a digest. Only where digests differ they exchange one of each fact, and then the facts that differ.

    Args:
        participants: The ranks.
        what: What the facts are about, for the error.
        facts: By name. Nested mappings and dataclasses are compared entry by entry, sets in any order, tensors without their
            device, functions by name; other values that JSON does not have count by their text, without addresses.
        mend: What to do about it, a sentence.

    Raises:
        ValueError: On all ranks, with the name of each fact that differs, and the values by rank.
    """
    own = _as_texts(facts, prefix="")
    if len(set(participants.gather(_digest(json.dumps(own, sort_keys=True))))) == 1:
        return
    digests = participants.gather({name: _digest(text) for name, text in own.items()})
    names = dict.fromkeys(name for each in digests for name in each)
    different = [name for name in names if len({each.get(name) for each in digests}) > 1]
    shown = different[:_MAX_SHOWN]
    texts = participants.gather({name: own[name] for name in shown if name in own})
    lines = [f"- {name}: {_values([each.get(name, 'nothing') for each in texts])}" for name in shown]
    if len(different) > len(shown):
        lines.append(f"- and {len(different) - len(shown)} more")
    raise ValueError("\n".join([f"ranks do not agree on {what}:", *lines, mend]))


def name_of(value: object) -> str:
    """Return the name of a function or a class, and for any other object that of its class."""
    if isinstance(value, functools.partial):
        return name_of(value.func)
    own = getattr(value, "__qualname__", None)  # introspection: functions and classes have a name, other objects do not
    return type(value).__qualname__ if own is None else str(own)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_texts(facts: Mapping[str, object], prefix: str) -> dict[str, str]:
    """Return facts by dotted name, as JSON."""
    texts: dict[str, str] = {}
    for name, value in facts.items():
        entries = _plain(value)
        if isinstance(entries, Mapping) and entries:
            texts |= _as_texts(cast("Mapping[str, object]", entries), f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = json.dumps(entries)
    return texts


def _plain(value: object) -> object:
    """Return what stands for a value in JSON: the same on ranks that have the same."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _plain(each) for key, each in cast("Mapping[object, object]", value).items()}
        case list() | tuple():
            return [_plain(each) for each in cast("list[object]", value)]
        case Set():
            return sorted((_plain(each) for each in cast("Set[object]", value)), key=json.dumps)
        case torch.Tensor():
            has_values = not (value.is_meta or isinstance(value, DTensor))
            return [str(value.dtype), list(value.shape), value.tolist() if has_values else None]
        case functools.partial():
            return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: _plain(getattr(value, name)) for name in names}  # introspection: declared fields
        case _ if callable(value):
            return name_of(value)
        case _:
            return _ADDRESS.sub("", str(value))


def _values(texts: list[str]) -> str:
    """Return the values that ranks have for a fact; of long ones what is around the first difference."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    alike = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*ranks_by_text, strict=False))
    start = max(0, sum(1 for _ in alike) - _NUM_BEFORE)
    return "; ".join(
        f"{_part(text, start)} on rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
        for text, ranks in ranks_by_text.items()
    )


def _part(text: str, start: int) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    end = start + _MAX_CHARACTERS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
