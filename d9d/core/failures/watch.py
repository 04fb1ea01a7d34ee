"""Lets all ranks of a job end when one of them fails, with the first failure as the reason of all.

[Note: how a failure travels]
While a block of the job runs, a thread of each rank holds a connection with rank 0. It costs nothing in a step: the thread
sleeps, and the working thread tells where it is by plain attributes (`Activity`).

- A rank that raises tells rank 0 before anything is cleaned up. Rank 0 tells the others.
- A rank whose connection ends without a word is gone.
- A rank whose collective has run into its limit, or which has been in one place for longer than that, has rank 0 ask all
  ranks where they are. What comes together is the failure.

The first failure stands in the store of the job, too, for ranks whose connection is not there yet. A rank that has heard of
one gets some seconds to raise by itself, which it mostly does, as collectives with a process that is gone fail. A rank that
is still inside of the block then (it sleeps, or waits in a collective that never fails) is ended by its thread, which needs
nothing of what the rank is stuck in.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from typing import NoReturn, final

from torch._C._distributed_c10d import Store  # torch.distributed re-exports it, and does not say so (torch 2.13)
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]  # the store has no public name (torch 2.13)
)

from d9d.core.dist_context import DistributedContext
from d9d.core.failures.activity import describe_error_stack, describe_stack
from d9d.core.failures.channel import Channel, Message
from d9d.core.failures.error_file import write_error_file
from d9d.core.failures.hub import Hub
from d9d.core.failures.report import Failure, JobFailedError, described, is_echo, is_timeout

__all__ = ["JobWatch", "watching"]

_TICK_S = 0.2
_PERIOD_S = 1.0
"""How often a rank tells where it is, for when it can do so no more."""
_CONNECT_PERIOD_S = 0.05
_CONNECT_LIMIT_S = 5.0
_ECHO_LIMIT_S = 2.0
"""How long an error that another rank may have caused waits for its cause, and then for what rank 0 finds out."""
_CONNECTION_WAIT_S = 1.0
"""How long a rank that fails at the very beginning waits for its connection, over which others hear of it at once."""
_TOLD_LIMIT_S = 2.0
_GRACE_S = 5.0
"""How long a rank may take to raise by itself, and to clean up, once the job has failed."""
_GRACE_AFTER_LIMIT_S = 1.5
"""The same where a limit has passed already."""
_SLACK_S = 1.0
"""By which a rank in one place outstays its limit: a collective that runs into it should say so first."""


@contextlib.contextmanager
def watching(context: DistributedContext) -> Generator["JobWatch"]:
    """End all ranks when one of them fails while the block runs. All ranks must enter it; it waits for none.

    See [Note: how a failure travels]. A job of one rank only writes its error file.

    Args:
        context: Ranks of the job.

    Raises:
        JobFailedError: Instead of an error that comes from a collective, if another rank is the reason.
    """
    watch = JobWatch(context)
    try:
        with watch.noting():
            yield watch
    finally:
        watch.leave()


@final
class JobWatch:
    """The watch of one rank over one block of the job; see `watching`, which is how to use it where a block is a block.

    It begins when it is built, on the thread that works, and ends with `leave`.

    Args:
        context: Ranks of the job. All ranks must build it.
    """

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._activity = context.activity
        self._worker = threading.get_ident()
        self._first: Failure | None = None
        self._is_known = threading.Event()
        self._known_s = 0.0
        self._noted: BaseException | None = None
        """What this rank has raised."""
        self._noted_s = 0.0
        self._is_over = False
        self._lock = threading.Lock()
        """Held where it is decided whether the block is over and who may still send."""
        self._channel: Channel | None = None
        self._hub: Hub | None = None
        self._store: Store | None = None
        self._key = ""
        if context.is_distributed:
            self._start()

    def _start(self) -> None:
        # With a connection of its own: the one of the process is blocked while the working thread waits in the store.
        store: Store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in stubs (torch 2.13)
        self._store = store
        # All ranks come to the same blocks in the same order, each counts for itself.
        number = store.add(f"d9d/watch/rank/{self._context.rank}", 1)
        self._key = f"d9d/watch/{number}"
        if self._context.rank == 0:
            is_local = self._context.num_nodes == 1
            self._hub = Hub(self._context.world_size, is_local=is_local, decide=self._decide)
            address = [socket.gethostname(), self._hub.port, self._hub.token]
            store.set(f"{self._key}/address", json.dumps(address))
        threading.Thread(target=self._run, name="d9d-failure-watch", daemon=True).start()

    # The working thread

    @contextlib.contextmanager
    def noting(self) -> Generator[None]:
        """Tell the other ranks at once what the block raises, before what is around it cleans up.

        Raises:
            JobFailedError: Instead of an error that comes from a collective, if another rank is the reason.
        """
        try:
            yield
        except BaseException as error:
            instead = self.note(error)
            if instead is None:
                raise
            raise instead from error

    def leave(self) -> None:
        """End the watch. The others go on without this rank."""
        with self._lock:
            self._is_over = True
            if self._channel is not None:
                self._channel.send(Message("bye", self._context.rank))
        if self._hub is not None:
            self._hub.close()

    @property
    def has_failed(self) -> bool:
        """Whether this rank has heard of a failure of any rank."""
        return self._is_known.is_set()

    def note(self, error: BaseException) -> JobFailedError | None:
        """Tell the other ranks of an error, and write it to the error file of torchelastic.

        An error that comes from a collective waits some seconds for its reason.

        Returns:
            What to raise in its place, if another rank is the reason; None: the error itself.
        """
        if not self._context.is_distributed or type(error) is JobFailedError:
            write_error_file(error, is_echo=type(error) is JobFailedError)
            return None
        echoes = is_echo(error)
        self._noted, self._noted_s = error, time.monotonic()
        if echoes:
            self._wait_for_cause(error)
        first = self._first or self._fail(Failure(self._context.rank, self._account(error)))
        self._is_known.wait(_TOLD_LIMIT_S)
        is_own = first.rank == self._context.rank and not first.is_observed
        if echoes and not is_own and (first.is_observed or not isinstance(error, JobFailedError)):
            instead = JobFailedError(f"rank {self._context.rank} ends with the job, because {first.text}")
            instead.__cause__ = error
            write_error_file(instead, is_echo=True)
            return instead
        if not is_own and described(error) not in first.text:
            _add_note_once(error, f"The first failure of the job: {first.text}")
        write_error_file(error, is_echo=not is_own)
        return None

    def _wait_for_cause(self, error: BaseException) -> None:
        """Wait until it is known why a collective has failed on this rank, or nobody knows."""
        if is_timeout(error):
            self._tell_stuck(f"a collective has taken longer than its limit ({_first_line(error)})")
        elif not self._is_known.wait(_ECHO_LIMIT_S):
            # Others have nothing to tell, and one of them may be gone that was never heard.
            self._tell_stuck(f"a collective has failed ({_first_line(error)})")
        self._is_known.wait(_ECHO_LIMIT_S)

    def _account(self, error: BaseException) -> str:
        return f"rank {self._context.rank} failed in {self._activity.describe()}: {described(error)}"

    def _fail(self, failure: Failure) -> Failure:
        """Let all know of a failure, and return the first one of the job."""
        first = self._decide(failure)
        end_s = time.monotonic() + _CONNECTION_WAIT_S
        while self._channel is None and not self._is_known.is_set() and time.monotonic() < end_s:
            time.sleep(_TICK_S / 4)
        if self._channel is None:
            self._know(first)
        else:
            # It comes back when all have been told.
            self._channel.send(Message("failed", self._context.rank, first.to_json()))
        return first

    def _decide(self, failure: Failure) -> Failure:
        """Return the first failure, which the store of the job keeps."""
        if self._store is None:
            return failure
        try:
            return Failure.from_json(self._store.compare_set(f"{self._key}/failure", "", failure.to_json()))
        except (RuntimeError, ValueError):
            return failure  # the process that keeps the store is gone

    def _tell_stuck(self, reason: str) -> None:
        text = f"the job stands still: on rank {self._context.rank}, {reason}"
        failure = Failure(self._context.rank, text, is_observed=True)
        if self._channel is not None:
            self._channel.send(Message("stuck", self._context.rank, failure.to_json()))
        else:
            self._fail(failure._replace(text=f"{text}\nrank {self._context.rank}: {self._whereabouts()}"))

    # The thread that watches

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and the working thread will notice
            self._connect()
        mark, since_s, told_s = (0, None), time.monotonic(), 0.0
        while not self._is_over:
            self._receive()
            now_s = time.monotonic()
            if self._is_known.is_set():
                self._end_if_due(now_s)
                continue
            if mark != (self._activity.step, self._activity.place):
                mark, since_s = (self._activity.step, self._activity.place), now_s
            if self._channel is not None and told_s < since_s and now_s - told_s > _PERIOD_S:
                told_s = now_s
                self._channel.send(Message("at", self._context.rank, self._activity.describe()))
            limit_s = self._activity.limit_s
            if limit_s is not None and now_s - since_s > limit_s + _SLACK_S:
                since_s = now_s
                self._tell_stuck(f"{self._activity.describe()} has taken longer than its limit of {limit_s:g} s")

    def _connect(self) -> None:
        """Connect with rank 0, once it is there; take a failure from the store meanwhile."""
        assert self._store is not None  # whoever starts the thread has it
        while not self._store.check([f"{self._key}/address"]):
            self._look_into_store()
            time.sleep(_CONNECT_PERIOD_S)
            if self._is_over:
                return
        host, port, token = json.loads(self._store.get(f"{self._key}/address"))
        connection = self._open(str(host), int(port))
        if connection is None:
            self._context.logger.warning(
                "rank %d does not reach port %d of rank 0: it will notice that others have failed by time limits only",
                self._context.rank,
                port,
            )
            return
        channel = Channel(connection)
        with self._lock:
            if self._is_over:
                channel.close()
                return
            channel.send(Message("hello", self._context.rank, str(token)))
            self._channel = channel
        self._look_into_store()

    def _open(self, host: str, port: int) -> socket.socket | None:
        is_here = self._context.num_nodes == 1 or host == socket.gethostname()
        for name in ("127.0.0.1",) if is_here else (self._context.master_addr, host):
            with contextlib.suppress(OSError):
                return socket.create_connection((name, port), timeout=_CONNECT_LIMIT_S)
        return None

    def _look_into_store(self) -> None:
        assert self._store is not None  # see _connect
        if self._store.check([f"{self._key}/failure"]):
            self._know(Failure.from_json(self._store.get(f"{self._key}/failure")))

    def _receive(self) -> None:
        channel = self._channel
        if channel is None:
            time.sleep(_TICK_S)
            if not self._is_over:
                with contextlib.suppress(RuntimeError):  # the store is gone, and the working thread will notice
                    self._look_into_store()
            return
        if not channel.wait(_TICK_S):
            return
        messages = channel.receive()
        for message in messages or ():
            match message.kind:
                case "failed":
                    self._know(Failure.from_json(message.text))
                case "where":
                    channel.send(Message("here", self._context.rank, self._whereabouts()))
                case "bye":
                    self._channel = None
                    channel.close()
                    return
                case _:
                    pass
        if messages is None and not self._is_over:
            self._channel = None
            channel.close()
            self._know(self._decide(Failure(0, "rank 0 is gone without an account: it was killed, or has crashed")))

    def _whereabouts(self) -> str:
        error = self._noted  # which has left where it was
        stack = describe_stack(self._worker) if error is None else describe_error_stack(error)
        return f"{self._activity.describe()}\n{stack}"

    def _know(self, failure: Failure) -> None:
        if not self._is_known.is_set():
            self._first = failure
            self._known_s = time.monotonic()
            self._is_known.set()

    def _end_if_due(self, now_s: float) -> None:
        assert self._first is not None  # it is known
        if now_s - max(self._known_s, self._noted_s) > (_GRACE_AFTER_LIMIT_S if self._first.is_observed else _GRACE_S):
            with self._lock:
                if not self._is_over:
                    self._end_process(self._first)

    def _end_process(self, first: Failure) -> NoReturn:
        rank = self._context.rank
        error = JobFailedError(f"rank {rank} ends in {self._activity.describe()}, because {first.text}")
        write_error_file(error, is_echo=first.rank != rank)
        sys.stderr.write(f"[d9d] {error}\n")
        sys.stderr.flush()
        # Not sys.exit: the working thread may be inside a collective that never returns.
        os._exit(1)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _add_note_once(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):  # introspection: errors without notes have no such attribute
        error.add_note(note)
