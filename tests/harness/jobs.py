"""Jobs whose ranks are killed: real processes that live for one job, and nothing of which may be left behind.

The ranks of the pool are for tests that end well. Here a rank is killed, hangs or fails on purpose:

    with running_job(train, tmp_path, num_ranks=2) as job:
        job.wait_until(lambda: (tmp_path / "ready").exists(), limit_s=20)
        job.kill()
    # no process of the job, and no child of one, exists any more

Processes are forked by the fork server of the pool, see [Note: Why a fork server], and meet through a file.
"""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, final

import pytest

from tests.harness.pool import one_blas_thread, preload_modules

__all__ = ["RunningJob", "running_job"]

GROUP_LIMIT_S = 60.0
"""How long ranks wait for each other in a collective, where the job sets no limit of its own."""
_POLL_S = 0.005
_GONE_LIMIT_S = 5.0
"""Time for the system to clear away a process that was killed."""


@final
class RunningJob:
    """The ranks of a job as the test sees them."""

    def __init__(self, processes: list[ForkServerProcess], outputs: list[Path]) -> None:
        self._processes = processes
        self._outputs = outputs

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit code of each rank: None while it runs, the negative number of the signal that has killed it."""
        return [process.exitcode for process in self._processes]

    def output(self, rank: int) -> str:
        """Return what a rank has written to stdout and stderr so far."""
        return self._outputs[rank].read_text(errors="replace") if self._outputs[rank].exists() else ""

    def send(self, signum: signal.Signals, *ranks: int) -> None:
        """Send a signal to some ranks, by default to all; those that are gone are passed over."""
        for rank in ranks or range(len(self._processes)):
            if self._processes[rank].exitcode is None:
                os.kill(self.pids[rank], signum)

    def kill(self, *ranks: int) -> None:
        """Send SIGKILL to some ranks, by default to all."""
        self.send(signal.SIGKILL, *ranks)

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for something that the job does. Fails if it takes longer, or if a rank ends before."""
        __tracebackhide__ = True
        end_s = time.monotonic() + limit_s
        while not condition():
            if any(code is not None for code in self.exit_codes) and not condition():
                pytest.fail(f"ranks have ended: exit codes {self.exit_codes}\n{self._outputs_text()}")
            if time.monotonic() > end_s:
                pytest.fail(f"hang: waited {limit_s:g} s\n{self._outputs_text()}")
            time.sleep(_POLL_S)

    def wait(self, limit_s: float) -> list[int]:
        """Wait until all ranks have ended and return their exit codes. Fails if that takes longer."""
        __tracebackhide__ = True
        end_s = time.monotonic() + limit_s
        for process in self._processes:
            process.join(max(end_s - time.monotonic(), 0.0))
        codes = [code for code in self.exit_codes if code is not None]
        if len(codes) < len(self._processes):
            pytest.fail(f"hang: after {limit_s:g} s exit codes are {self.exit_codes}\n{self._outputs_text()}")
        return codes

    def _outputs_text(self) -> str:
        return "\n".join(f"--- rank {rank} ---\n{self.output(rank)[-4000:]}" for rank in range(len(self._processes)))


@contextmanager
def running_job(
    target: Callable[..., None],
    folder: Path,
    *args: Any,
    num_ranks: int = 2,
    environment: dict[str, str] | None = None,
) -> Generator[RunningJob]:
    """Run a function on ranks that have a default gloo group, while the block runs; kill what is left of them after it.

    Fails if a process that they have started is still there then.

    Args:
        target: Function of a module that ranks can import.
        folder: Where to put the file by which ranks meet, and their outputs; an older job may have used it.
        args: Arguments of the function, pickled.
        num_ranks: How many ranks.
        environment: Variables beside those of torchrun.
    """
    context = multiprocessing.get_context("forkserver")
    preload_modules(context)
    attempt = f"{time.time_ns():x}"
    processes: list[ForkServerProcess] = []
    outputs = [folder / f"output-{attempt}-rank{rank}.txt" for rank in range(num_ranks)]
    for rank in range(num_ranks):
        start = RankStart(
            rank=rank,
            num_ranks=num_ranks,
            store=str(folder / f"store-{attempt}"),
            output=str(outputs[rank]),
            environment=dict(os.environ) | (environment or {}),
        )
        processes.append(context.Process(target=run_rank, args=(start, target, args), name=f"job-rank-{rank}"))
    with one_blas_thread():
        for process in processes:
            process.start()
    job = RunningJob(processes, outputs)
    try:
        yield job
    finally:
        job.kill()
        job.wait(_GONE_LIMIT_S)
    _fail_for_orphans(job.pids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank must know before it runs anything."""

    rank: int
    num_ranks: int
    store: str
    output: str
    environment: dict[str, str]


def run_rank(start: RankStart, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run the function of a job as one of its ranks. Entry point of a process."""
    # The pytest process reads this module too, and needs no torch to look after ranks.
    import torch

    from tests.harness import rank_state

    # What was imported stays: collections of the trainer, one before each save, take 0.2 s if they go through it.
    gc.freeze()
    # A session of its own, by which its children are found; and killed where the test itself is.
    os.setsid()
    _die_with_parent()
    multiprocessing.set_start_method(None, force=True)  # data loaders start as those of users do
    torch.set_num_threads(1)
    variables = start.environment | rank_state.torchrun_environment(start.rank, start.num_ranks)
    with (
        rank_state.environment(variables),
        rank_state.redirected_output(Path(start.output)),
        rank_state.process_group(start.rank, start.num_ranks, start.store, GROUP_LIMIT_S),
    ):
        target(*args)


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the fork server ends, which it does with the pytest process."""
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _fail_for_orphans(sessions: list[int]) -> None:
    __tracebackhide__ = True
    end_s = time.monotonic() + _GONE_LIMIT_S
    while orphans := [pid for session in sessions for pid in _processes_of(session)]:
        if time.monotonic() > end_s:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"processes outlived the ranks that started them: {orphans}")
        time.sleep(_POLL_S)


def _processes_of(session: int) -> list[int]:
    """Return the processes of a session that are no zombies."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a program is in parentheses and may hold anything: state, parent, group, session come after it.
            state, _, _, own_session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it is gone
        if int(own_session) == session and state != "Z":
            found.append(int(path.parent.name))
    return found
