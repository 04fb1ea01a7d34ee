"""Signals that tell a job to end: noted instead of obeyed, told to all ranks, and turned into an exit code.

[Note: ending between steps]
A scheduler that wants its machine back sends a signal and kills the job some seconds later. The handler of the signal only
notes it, since a save in the middle of whatever the process does just then would store half a step. Every second or so the
ranks tell each other over the CPU, at the same step, which signals they have got: one rank that was signalled is enough, and
no rank waits for its device. They then save between two steps and exit. The second signal of a process has its usual effect
at once. What is on the disk stays whole: a checkpoint that is not committed does not count.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from types import FrameType
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]  # the store has no public name (torch 2.13)
)

from d9d.core.dist_context import DistributedContext

__all__ = ["PreemptedExit", "SignalAgreement", "StopSignals", "end_at_once", "exit_code_of", "wait_for_ends"]

_TARGET_S = 1.0
"""Time between two exchanges that they settle at, in seconds: short against the 30 s that schedulers leave a job to save
in, and long against the tenth of a millisecond that an exchange takes."""

_MAX_STEPS = 64
"""Most steps between two exchanges, so that a stretch of fast steps does not put off the next one for long."""


END_LIMIT_S = 300.0
"""How long a rank that a signal ends waits for the others, in seconds. A launcher that was told to end itself kills them
earlier; one that sees a rank exit ends the others, though they may still write a log."""

_POLL_S = 0.05


def exit_code_of(signum: int) -> int:
    """Return the exit code of a process that a signal has ended, as shells have it: 143 for SIGTERM, 138 for SIGUSR1."""
    return 128 + signum


class PreemptedExit(SystemExit):
    """Ends a process whose job was told to end by a signal, after its state was saved. Its code is `exit_code_of` that."""

    def __init__(self, signum: int) -> None:
        """Take the signal that any of the ranks has got."""
        super().__init__(exit_code_of(signum))
        self.signum = signum


def wait_for_ends(context: DistributedContext) -> None:
    """Wait until all ranks have come to their end, or `END_LIMIT_S` have passed. All ranks must call it; blocks the host.

    Not by a collective: limits of those are made for steps, and ranks may close trackers and write logs for longer. Nor does it
    raise where one of them fails on its way.
    """
    size = context.world_size
    if size == 1:
        return
    with contextlib.suppress(RuntimeError):  # who keeps the store may go first, when all are through
        store = _get_default_store()
        num_ends = store.add("d9d/num_ends", 1)
        expected = -(-num_ends // size) * size  # those of earlier runs in these processes count too
        end_s = time.monotonic() + END_LIMIT_S
        while store.add("d9d/num_ends", 0) < expected and time.monotonic() < end_s:
            time.sleep(_POLL_S)


def end_at_once(signum: int) -> None:
    """Let a signal end this process as if nothing handled it. Only the main thread can."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


@final
class StopSignals:
    """Notes the first of some signals; see [Note: ending between steps].

    Args:
        signals: Which ones.
        logger: Is told of signals.
    """

    def __init__(self, signals: Sequence[signal.Signals], logger: logging.Logger) -> None:
        self._signals = tuple(signals)
        self._logger = logger
        self._pid = os.getpid()
        self.received = 0
        """Number of the first signal that this process has got; 0 for none."""

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        """Handle the signals while the block runs, in place of whoever did before. On the main thread, else without effect."""
        if not self._signals:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            self._logger.warning(
                "signals are not noted: Python handles them on the main thread, and this is another one."
            )
            yield
            return
        self._pid, self.received = os.getpid(), 0
        before = {each: signal.signal(each, self._note) for each in self._signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                # None: a handler that Python does not know. It can not be put back.
                signal.signal(each, signal.SIG_DFL if handler is None else handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a worker of a pool, which is to end when it is told to.
            end_at_once(signum)
        elif self.received:
            self._logger.warning("got %s again: ending at once.", _name(signum))
            end_at_once(signum)
        else:
            self.received = signum
            self._logger.warning("got %s: the job ends after a step. A second signal ends it at once.", _name(signum))


def _name(signum: int) -> str:
    return signal.Signals(signum).name


@final
class SignalAgreement:
    """Lets all ranks learn at the same step what some of them have noted. See [Note: ending between steps].

    Args:
        dist_context: The ranks; None for a process on its own.
    """

    def __init__(self, dist_context: DistributedContext | None) -> None:
        self._device: torch.device | None = None
        if dist_context is not None and dist_context.is_distributed:
            # The default group speaks over the CPU, unless the user has made one that does not.
            has_cpu = "cpu:" in dist.get_backend_config()
            self._device = torch.device("cpu") if has_cpu else dist_context.current_device
        self._num_steps_left = 1
        self._interval = 1
        self._last_exchange_s: float | None = None

    def exchange_if_due(self, *notes: int) -> tuple[int, ...] | None:
        """Return the largest of each note over all ranks, and None if this is not a step at which they tell each other.

        All ranks must call it once for each step. Blocks the host until all have, where an exchange is due: about once a
        second, or at each step where steps are slower.
        """
        if self._device is None:
            return notes
        self._num_steps_left -= 1
        if self._num_steps_left > 0:
            return None
        now_s = time.monotonic()
        elapsed_s = 0.0 if self._last_exchange_s is None else now_s - self._last_exchange_s
        shared = torch.tensor([*map(float, notes), elapsed_s], device=self._device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        *agreed, elapsed_s = shared.tolist()
        self._last_exchange_s = now_s
        # The slowest rank's time, so that all ranks come to the same number.
        fitting = self._interval * _TARGET_S / max(elapsed_s, 1e-6)
        self._interval = int(min(max(fitting, 1), 2 * self._interval, _MAX_STEPS))
        self._num_steps_left = self._interval
        return tuple(map(int, agreed))
