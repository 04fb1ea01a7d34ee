"""A rank as the pytest process sees it: send, poll, look at its stack, kill."""

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.harness.messages import Finish, RankOutcome, RankTask, Ready

START_LIMIT_S = 120.0
"""Importing torch takes 2 s on a free machine; the first start on a cold disk takes far longer."""


def _enter_rank(connection: Connection, stack_path: str, pytest_args: Sequence[str]) -> None:
    # Imported here: the pytest process reads this module too, and needs no torch to look after ranks.
    from tests.harness.worker import serve

    serve(connection, stack_path, pytest_args)


class RankProcess:
    """Owns one process of the pool. Used by the main thread of the pytest process alone."""

    def __init__(self, context: ForkServerContext, stack_path: Path, pytest_args: Sequence[str]) -> None:
        """Start the process without waiting for it.

        Args:
            context: Where to start it.
            stack_path: File to which the rank writes its Python stack when asked.
            pytest_args: Command line of the rank's pytest config.
        """
        self._stack_path = stack_path
        self.connection, rank_end = context.Pipe()
        self._process = context.Process(
            target=_enter_rank, args=(rank_end, str(stack_path), tuple(pytest_args)), daemon=True, name="test-rank"
        )
        self._process.start()
        # Only the rank may hold its end, or its death would not show as the end of the pipe.
        rank_end.close()

    @property
    def waitables(self) -> tuple[Connection, int]:
        """What becomes readable when the rank has spoken or died."""
        return self.connection, self._process.sentinel

    def wait_until_ready(self) -> None:
        """Block until the rank takes tasks.

        Raises:
            RuntimeError: If it died, or was not ready in time.
        """
        if self.connection.poll(START_LIMIT_S):
            try:
                message = self.connection.recv()
            except EOFError:
                raise RuntimeError(f"A test rank died while it started: {self._describe_exit()}.") from None
            if message == Ready():
                return
        raise RuntimeError(f"A test rank was not ready {START_LIMIT_S:g} s after its start.")

    def send(self, message: RankTask | Finish) -> None:
        """Send a message; a rank that died in the meantime is found by the next `poll`."""
        try:
            self.connection.send(message)
        except OSError:
            self._process.join(timeout=1)

    def poll(self) -> RankOutcome | str | None:
        """Return the outcome of the current task, how the rank died, or None while it runs."""
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, OSError):
                return self._describe_exit()
        return None if self._process.is_alive() else self._describe_exit()

    def _describe_exit(self) -> str:
        self._process.join(timeout=1)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name} (exit code {code})"
        return f"exit code {code}"

    def request_stack(self) -> None:
        """Make the rank write its stack, which takes a moment, even if it is stuck in C++."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR2)

    def read_stack(self) -> str:
        """Return what was written since the rank started."""
        return self._stack_path.read_text() if self._stack_path.exists() else ""

    def kill(self) -> None:
        """End the rank and its children at once."""
        pid = self._process.pid
        try:
            if pid is not None:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has not made its own group yet, or is gone
        self._process.join(timeout=5)
        self.connection.close()
