"""The first failure of a job, and which errors are only what it does to others."""

import json
from typing import NamedTuple, Self

import torch.distributed as dist

__all__ = ["Failure", "JobFailedError", "described", "is_echo", "is_timeout", "spans"]

_MAX_CHARACTERS = 6_000
"""Of a failure that is sent around: a message may hold a whole program."""


class JobFailedError(RuntimeError):
    """The job ends because of another rank; the message says which one, where and why."""


class Failure(NamedTuple):
    """Why a job ends."""

    rank: int
    """Who has failed, or has noticed that nothing goes on."""
    text: str
    """A sentence, or a report of several lines."""
    is_observed: bool = False
    """Whether it tells what a rank has noticed, and where all are, instead of what that rank has done."""

    def to_json(self) -> str:
        """Return it as a line."""
        return json.dumps([self.rank, self.text[:_MAX_CHARACTERS], self.is_observed])

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Return what `to_json` has written."""
        rank, text, is_observed = json.loads(line)
        return cls(int(rank), str(text), bool(is_observed))


def described(error: BaseException) -> str:
    """Return type and message of an error."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_echo(error: BaseException | None) -> bool:
    """Tell whether an error may come from a collective whose other ranks are gone, rather than from what a rank computes."""
    # Gloo has no type of its own.
    return isinstance(error, dist.DistError | JobFailedError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error) for word in ("gloo", "Connection closed by peer", "Application timeout"))
    )


def is_timeout(error: BaseException) -> bool:
    """Tell whether an error may come from a collective that has taken longer than its limit."""
    return is_echo(error) and any(word in str(error) for word in ("imed out", "timeout", "Timeout"))


def spans(ranks: list[int]) -> str:
    """Return ascending ranks as text, those in a row as one: ``0-2, 5``."""
    parts: list[tuple[int, int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1] = parts[-1][0], rank
        else:
            parts.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
