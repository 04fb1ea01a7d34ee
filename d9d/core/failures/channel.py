"""Lines of JSON between two processes of a job.

Nothing that is received is unpickled or executed, and a process that does not know the token of the job is not heard.
"""

import contextlib
import json
import os
import select
import socket
import threading
import weakref
from typing import Literal, NamedTuple, TypeAlias, cast, final

__all__ = ["Channel", "Kind", "Message", "listen"]

Kind: TypeAlias = Literal["hello", "at", "here", "failed", "stuck", "where", "bye"]

_SEND_LIMIT_S = 2.0
_MAX_LINE_BYTES = 1 << 20
_RECEIVED_BYTES = 1 << 16

_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of this process, which its forked children close: the system tells of the end of a process when the last copy of
a socket is closed, and loader processes outlive a rank that was killed."""


def _close_copies() -> None:
    for each in tuple(_OPEN):
        each.close()


os.register_at_fork(after_in_child=_close_copies)


class Message(NamedTuple):
    """What is told.

    To rank 0: "hello" with the token, "at" with where a rank is from time to time, "failed" with a `Failure`, "stuck" with one
    that it has noticed, "here" as the answer to "where", "bye". From rank 0: "where" asks, "failed" tells of the first
    `Failure`, "bye".
    """

    kind: Kind
    rank: int
    text: str = ""


@final
class Channel:
    """One end of a connection. Any thread may send; one thread receives.

    Args:
        connection: A connected socket, which is closed with this.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_LIMIT_S)
        _OPEN.add(connection)
        self.socket = connection
        """For selectors."""
        self._unread = b""
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. One that nobody receives any more is lost: who has left will be noticed."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(line)

    def wait(self, limit_s: float) -> bool:
        """Wait for something to receive, and tell whether there is something."""
        poller = select.poll()  # takes any descriptor, other than select.select
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(limit_s * 1000))

    def receive(self) -> list[Message] | None:
        """Return the messages that are complete, after waiting for some bytes; None if the other side is gone."""
        try:
            received = self.socket.recv(_RECEIVED_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        if not received or len(self._unread) > _MAX_LINE_BYTES:
            return None
        try:
            return [_read(line) for line in lines]
        except (ValueError, RecursionError):
            return None  # it is none of ours

    def close(self) -> None:
        """Let the other side know that nothing comes any more."""
        self.socket.close()


def _read(line: bytes) -> Message:
    match json.loads(line):
        case [str(kind), int(rank), str(text)]:
            return Message(cast("Kind", kind), rank, text)
        case _:
            raise ValueError("not a message")


def listen(*, is_local: bool) -> socket.socket:
    """Return a socket that listens on a free port.

    Args:
        is_local: Whether all processes are on this machine, so that no other one need reach it.
    """
    if is_local:
        listener = socket.create_server(("127.0.0.1", 0))
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    _OPEN.add(listener)
    return listener
