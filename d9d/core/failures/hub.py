"""Rank 0's end of the watch: hears of all ranks, and tells all of the first failure."""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import final

from d9d.core.failures.channel import Channel, Message, listen
from d9d.core.failures.report import Failure, spans

__all__ = ["Hub"]

_TICK_S = 0.2
_INQUIRY_LIMIT_S = 1.5
"""How long ranks have to answer where they are. The thread that answers needs the interpreter for a moment only."""
_MAX_PLACES = 8
"""Places that a report shows: the last 40 lines of an output hold it, with what comes after it."""


@final
class Hub:
    """Holds a connection with each rank for one block of the job, in a thread of its own.

    The system closes the connections of a process that ends, however it does, so that a rank which was killed is known at
    once, and one that is merely busy is never taken for dead.

    Args:
        num_ranks: Ranks of the job.
        is_local: Whether they are all on this machine.
        decide: Takes a failure, and returns the first one of the job.
    """

    def __init__(self, num_ranks: int, *, is_local: bool, decide: Callable[[Failure], Failure]) -> None:
        self._num_ranks = num_ranks
        self._decide = decide
        self._listener = listen(is_local=is_local)
        self.port: int = self._listener.getsockname()[1]
        """Where ranks connect to."""
        self.token = secrets.token_hex(16)
        """What they must know."""
        self._channels: dict[int, Channel] = {}
        self._places: dict[int, str] = {}
        self._failure: Failure | None = None
        self._inquiry: tuple[float, Failure] | None = None
        self._answers: dict[int, str] = {}
        self._is_over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="d9d-failure-hub", daemon=True).start()

    def close(self) -> None:
        """Let all ranks go. They go on without this one."""
        self._broadcast(Message("bye", 0))
        self._is_over.set()

    def _broadcast(self, message: Message) -> None:
        # Rank 0 last: when it has heard of its own failure, all others have been told.
        for rank in sorted(self._channels, reverse=True):
            channel = self._channels.get(rank)
            if channel is not None:
                channel.send(message)

    def _run(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            if self._inquiry is not None:
                self._conclude(*self._inquiry)
        for channel in self._channels.values():
            channel.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or too many open files: the others are heard all the same
            connection: socket.socket = self._listener.accept()[0]
            channel = Channel(connection)
            self._selector.register(connection, selectors.EVENT_READ, channel)

    def _read(self, channel: Channel) -> None:
        messages = channel.receive()
        for message in messages or ():
            if message.kind == "hello":
                self._greet(channel, message)
            elif self._channels.get(message.rank) is channel:
                self._hear(channel, message)
        if messages is None:
            gone = [rank for rank, each in self._channels.items() if each is channel]
            self._forget(channel)
            for rank in gone:
                self._fail(Failure(rank, _unaccounted(rank, self._places.get(rank, "start-up"))))

    def _greet(self, channel: Channel, message: Message) -> None:
        if (
            not secrets.compare_digest(message.text.encode(), self.token.encode())
            or not 0 <= message.rank < self._num_ranks
        ):
            self._forget(channel)
            return
        self._channels[message.rank] = channel
        if self._failure is not None:
            channel.send(Message("failed", self._failure.rank, self._failure.to_json()))
        elif self._inquiry is not None:
            channel.send(Message("where", 0))

    def _hear(self, channel: Channel, message: Message) -> None:
        match message.kind:
            case "at":
                self._places[message.rank] = message.text
            case "here":
                self._answers[message.rank] = message.text
            case "failed":
                self._fail(Failure.from_json(message.text))
            case "stuck":
                self._inquire(Failure.from_json(message.text))
            case "bye":
                self._forget(channel)
            case _:
                pass

    def _forget(self, channel: Channel) -> None:
        for rank in [rank for rank, each in self._channels.items() if each is channel]:
            del self._channels[rank]
        if channel.socket.fileno() >= 0:  # a stranger may have given several reasons
            self._selector.unregister(channel.socket)
            channel.close()

    def _inquire(self, noticed: Failure) -> None:
        """Ask all ranks where they are."""
        if self._inquiry is None and self._failure is None:
            self._answers.clear()
            self._inquiry = time.monotonic() + _INQUIRY_LIMIT_S, noticed
            self._broadcast(Message("where", 0))

    def _conclude(self, end_s: float, noticed: Failure) -> None:
        """Report where ranks are, once all have answered or have had the time to."""
        if time.monotonic() < end_s and len(self._answers) < self._num_ranks:
            return
        self._inquiry = None
        self._fail(noticed._replace(text=f"{noticed.text}\n{self._report()}"))

    def _report(self) -> str:
        ranks_by_place: dict[str, list[int]] = {}
        for rank in range(self._num_ranks):
            if rank in self._answers:
                place = self._answers[rank]
            elif rank in self._channels:
                place = f"does not answer: native code keeps its interpreter. Last seen in {self._places.get(rank, 'start-up')}"
            else:
                place = "has not come this far, or is gone"
            ranks_by_place.setdefault(place, []).append(rank)
        # What few ranks do is what many wait for.
        shown = sorted(ranks_by_place.items(), key=lambda item: len(item[1]))[:_MAX_PLACES]
        lines = [f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}: {place}" for place, ranks in shown]
        if len(ranks_by_place) > len(shown):
            lines.append(f"and {len(ranks_by_place) - len(shown)} other places")
        return "\n".join(lines)

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = self._decide(failure)
            self._inquiry = None
            self._broadcast(Message("failed", self._failure.rank, self._failure.to_json()))


def _unaccounted(rank: int, place: str) -> str:
    return (
        f"rank {rank} is gone without an account, last seen in {place}: it was killed (by a signal, or for its memory), has "
        f"crashed in native code, or has left by os._exit(). Its own output, and the log of its machine, tell more"
    )
