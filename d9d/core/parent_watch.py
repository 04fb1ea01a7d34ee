"""End a process that a launcher has started when the launcher is gone."""

import contextlib
import os
import sys
import threading
from collections.abc import Generator

_PERIOD_S = 1.0
"""How often to look: a job that lost its launcher must be gone within seconds."""

_GRACE_S = 20.0
"""For a process that is about to end by itself: with an error of its own to print, or just slower than its launcher."""


@contextlib.contextmanager
def ends_with_parent(parent_pid: int) -> Generator[None]:
    """End this process soon after a parent process has died, while the block runs.

    Lightning's launcher ends the others when one of its children fails, but nobody ends the children when the launcher
    itself is killed: they would wait for rank 0 until their time limit, half an hour later.

    Args:
        parent_pid: Process that started this one, directly or through a shell.
    """
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(parent_pid, is_over), name="d9d-parent-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()


def ends_with_torchrun() -> contextlib.AbstractContextManager[None]:
    """Do what `ends_with_parent` does under torchrun, whose agent is the parent of its workers; elsewhere do nothing."""
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ
    return ends_with_parent(os.getppid()) if is_worker else contextlib.nullcontext()


def _watch(parent_pid: int, is_over: threading.Event) -> None:
    is_child = os.getppid() == parent_pid
    # A process that is not collected by its own parent still exists when it has died, but has no children any more.
    while os.getppid() == parent_pid if is_child else _exists(parent_pid):
        if is_over.wait(_PERIOD_S):
            return
    if not is_over.wait(_GRACE_S):
        sys.stderr.write(f"[d9d] process {parent_pid}, which started this one, is gone. Exiting.\n")
        sys.stderr.flush()
        # Not sys.exit: the main thread may be inside a collective that never returns.
        os._exit(1)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
