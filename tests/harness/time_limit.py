"""A time limit for code in the pytest process itself."""

import faulthandler
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import pytest

ABORT_AFTER_S = 15.0
"""A signal handler runs only between bytecodes: code stuck in C++ ends the whole run, this long after its limit."""


@contextmanager
def time_limit(limit_s: float, stderr_fd: int) -> Generator[None]:
    """Fail the test when the block runs for longer. Main thread only.

    Args:
        limit_s: In seconds.
        stderr_fd: Where the stacks of all threads go if the process must be ended.
    """
    __tracebackhide__ = True

    def expire(signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        # Raised inside the stuck code, so the report shows its stack. Not an Exception: the code cannot swallow it.
        pytest.fail(f"hang: did not finish within {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + ABORT_AFTER_S, exit=True, file=stderr_fd)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
