"""The pool: ranks that outlive a test, replaced when a test did not end well on all of them, and when they are worn.

[Note: Why a fork server] A rank needs torch and its distributed parts: 3 s of imports, and as much for Lightning. The fork
server imports them once and forks each rank from itself in 10 ms, so that growing the pool, and replacing it after a
failure, is nearly free. That is safe as it never computes: it has one thread, no process group, no device context.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal

from tests.harness.messages import Finish, OutcomeKind, RankOutcome, RankTask, TestCall
from tests.harness.rank_process import RankProcess

GRACE_S = 2.0
"""How long the other ranks may run on when one has failed: they are likely stuck in a collective."""

TEARDOWN_LIMIT_S = 15.0
_STACK_DUMP_S = 0.3

PRELOADED = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
)
"""Modules of the fork server. None of ours: a test shall find them not yet imported."""
PRELOADED_IF_USED = ("lightning", "transformers")
"""Modules of the fork server if pytest has imported them by the time that it starts: as slow as all others together. They
start no thread as long as OpenBLAS has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What became of a test on one rank.

    Attributes:
        kind: The outcome that the rank sent; "died" if it could not; "stuck" if it ran past its time.
        text: Traceback, reason, exit code or stack, by kind.
        after_s: When that was, since the test (or its teardown) began.
        is_worn: Whether the rank asks to be replaced.
        output: What the rank wrote to stdout and stderr.
    """

    rank: int
    kind: OutcomeKind | Literal["died", "stuck"]
    text: str
    after_s: float
    is_worn: bool = False
    output: str = ""

    @property
    def ended_well(self) -> bool:
        """Whether the rank may be used again."""
        return self.kind in ("passed", "skipped", "xfailed")


class RankPool:
    """Runs tests on the first `world_size` of its ranks, which it starts when a test first needs them."""

    def __init__(self, pytest_args: Sequence[str]) -> None:
        """Make an empty pool.

        Args:
            pytest_args: Command line of the pytest config in each rank, for the rewriting of asserts.
        """
        self._pytest_args = pytest_args
        self._context = multiprocessing.get_context("forkserver")
        self._directory = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self._num_started = 0
        self._num_tests = 0
        self._ranks: list[RankProcess] = []

    def run(self, call: TestCall, world_size: int, timeout_s: float) -> list[RankReport]:
        """Run a test and return a report per rank. Blocks until all ranks ended, or are given up.

        Ranks that could not connect are replaced, once: on a busy machine gloo now and then loses a connection while it
        makes them, and the test has not begun by then.
        """
        reports = self._run_once(call, world_size, timeout_s)
        if any(report.kind == "no_group" for report in reports):
            reports = self._run_once(call, world_size, timeout_s)
        return reports

    def _run_once(self, call: TestCall, world_size: int, timeout_s: float) -> list[RankReport]:
        self._grow(world_size)
        self._num_tests += 1
        run_directory = self._directory / f"test-{self._num_tests}"
        run_directory.mkdir()
        try:
            reports = self._run_in(run_directory, call, world_size, timeout_s)
        except BaseException:  # Ctrl-C, or a fault of the harness: the ranks are in an unknown state
            self._kill_ranks()
            raise
        if not all(report.ended_well for report in reports):
            self._kill_ranks()
        shutil.rmtree(run_directory, ignore_errors=True)
        return reports

    def close(self) -> None:
        """End all ranks."""
        self._kill_ranks()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _grow(self, world_size: int) -> None:
        num_missing = world_size - len(self._ranks)
        if num_missing <= 0:
            return
        preload_modules(self._context)
        with one_blas_thread():
            started = [self._start_rank() for _ in range(num_missing)]
        try:
            for rank in started:
                rank.wait_until_ready()
        except BaseException:
            self._kill_ranks()
            raise

    def _start_rank(self) -> RankProcess:
        self._num_started += 1
        rank = RankProcess(self._context, self._directory / f"stack-{self._num_started}.txt", self._pytest_args)
        self._ranks.append(rank)
        return rank

    def _run_in(self, directory: Path, call: TestCall, world_size: int, timeout_s: float) -> list[RankReport]:
        ranks = self._ranks[:world_size]
        outputs = [directory / f"rank-{rank}.txt" for rank in range(world_size)]
        for rank, process in enumerate(ranks):
            process.send(
                RankTask(
                    call=call,
                    rank=rank,
                    world_size=world_size,
                    store_path=str(directory / "store"),
                    output_path=str(outputs[rank]),
                    timeout_s=timeout_s,
                )
            )
        reports = _collect(ranks, timeout_s)
        if all(report.ended_well for report in reports):
            for process in ranks:
                process.send(Finish())
            teardowns = _collect(ranks, TEARDOWN_LIMIT_S)
            if not all(report.ended_well for report in teardowns):
                reports = teardowns
            elif any(report.is_worn for report in teardowns):
                self._kill_ranks()
        return [replace(report, output=_read(output)) for report, output in zip(reports, outputs, strict=True)]

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []


def _collect(ranks: Sequence[RankProcess], limit_s: float) -> list[RankReport]:
    """Wait for every rank's answer; once one did not pass, only `GRACE_S` longer."""
    start = time.monotonic()
    end_s = limit_s
    reports: dict[int, RankReport] = {}
    while len(reports) < len(ranks) and (now_s := time.monotonic() - start) < end_s:
        pending = [rank for rank in range(len(ranks)) if rank not in reports]
        wait([waitable for rank in pending for waitable in ranks[rank].waitables], timeout=end_s - now_s)
        for rank in pending:
            report = _poll(rank, ranks[rank], time.monotonic() - start)
            if report is None:
                continue
            reports[rank] = report
            if report.kind != "passed":
                end_s = min(end_s, report.after_s + GRACE_S)
    stuck = [rank for rank in range(len(ranks)) if rank not in reports]
    for rank, stack in _read_stacks(ranks, stuck).items():
        reports[rank] = RankReport(rank=rank, kind="stuck", text=stack, after_s=end_s)
    return [reports[rank] for rank in range(len(ranks))]


def _poll(rank: int, process: RankProcess, now_s: float) -> RankReport | None:
    match process.poll():
        case None:
            return None
        case RankOutcome(kind=kind, text=text, is_worn=is_worn):
            return RankReport(rank=rank, kind=kind, text=text, after_s=now_s, is_worn=is_worn)
        case how_it_died:
            return RankReport(rank=rank, kind="died", text=how_it_died, after_s=now_s)


def _read_stacks(ranks: Sequence[RankProcess], stuck: Sequence[int]) -> dict[int, str]:
    for rank in stuck:
        ranks[rank].request_stack()
    if stuck:
        time.sleep(_STACK_DUMP_S)
    return {rank: ranks[rank].read_stack() for rank in stuck}


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def preload_modules(context: ForkServerContext, further: Sequence[str] = ()) -> None:
    """Tell the fork server what to import, unless it runs already."""
    used = [name for name in PRELOADED_IF_USED if name in sys.modules]
    context.set_forkserver_preload([*PRELOADED, *used, *further])


@contextmanager
def one_blas_thread() -> Generator[None]:
    # numpy's OpenBLAS starts its threads on import, and a process with threads should not fork. The fork server
    # takes our environment when it starts; ranks get theirs with each task.
    saved = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if saved is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = saved
