"""What the pytest process and the ranks say to each other. Plain values only, so that sending never fails."""

from dataclasses import dataclass
from typing import Literal

import pytest

OutcomeKind = Literal["passed", "failed", "skipped", "xfailed", "no_group"]
"""How a task ended; "no_group": its ranks could not connect, before the test began."""

RANK_FIXTURES = {"monkeypatch": pytest.MonkeyPatch}
"""Fixtures that act on the process of the test: they are not sent, each rank builds its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestSource:
    """Where a rank finds a test, in the terms of pytest's importer, so that both sides give its module one name."""

    __test__ = False  # pytest would collect it by its name

    path: str
    function: str
    import_mode: str
    root: str
    consider_namespace_packages: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCall:
    """A test with its arguments, before it is dealt to ranks.

    Attributes:
        arguments: Pickled dict. Ranks read it after they imported the test module, which may define its classes.
        rank_fixtures: Names in `RANK_FIXTURES` that the test asks for.
        environment: The environment of the pytest process at the time of the call.
    """

    __test__ = False

    source: TestSource
    arguments: bytes
    rank_fixtures: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One rank's share of a test.

    Attributes:
        store_path: File of the rendezvous, new for each test.
        output_path: File that takes what the rank writes to stdout and stderr.
        timeout_s: Time limit of the test; the process group's collectives get the same.
    """

    call: TestCall
    rank: int
    world_size: int
    store_path: str
    output_path: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """All ranks are through with the test body: tear the process group down."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has imported torch and waits for tasks."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a test body, and then its teardown, ended on a rank.

    Attributes:
        text: A traceback, or the reason of a skip.
        is_worn: Whether what tests have left in the rank costs more than a new one.
    """

    kind: OutcomeKind
    text: str = ""
    is_worn: bool = False
