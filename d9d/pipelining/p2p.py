"""Transfers between the ranks of a pipeline: started by actions, waited for by the passes that need them."""
# the number of users of a storage has no public name (torch 2.13)
# pyright: reportPrivateUsage=false

import contextlib
from collections import defaultdict, deque
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from d9d.core.placement import local_tensor

__all__ = [
    "BatchedTransport",
    "BufferPool",
    "DirectTransport",
    "PeerLostError",
    "Transfer",
    "Transport",
    "build_transport",
    "close_group",
    "is_unshared",
]

MAX_SENDS_IN_FLIGHT = 16
"""Sends to one rank that may be under way before the next one waits for the oldest.

A send keeps its tensor. Programs are free of deadlocks even if every send blocks, so waiting is safe; sixteen hide the
latency of a link and keep the number of tensors independent of the number of microbatches.
"""


class PeerLostError(RuntimeError):
    """A transfer has failed, in nearly all cases because the other rank has."""


class Transfer(Protocol):
    """One or more tensors on their way."""

    def wait(self) -> None:
        """Return when the tensors may be used; on an accelerator the stream waits, not the host."""
        ...


class Transport(Protocol):
    """Moves tensors between two ranks, in the order of the calls."""

    passes_ahead: int
    """Forward and backward passes before the one that needs a result at which it is best asked for."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        """Start to send; the tensors must not be changed any more.

        Args:
            tensors: Contiguous tensors on the device of the group.
            peer: Rank in the group.
            tag: Where the backend has tags, only a receive with the same one gets the tensors.
        """
        ...

    def receive(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Transfer:
        """Start to receive into tensors of the shapes and types that the peer sends."""
        ...

    def flush(self) -> None:
        """Start what has been queued, before the device gets other work."""
        ...

    def finish(self) -> None:
        """Wait for all sends."""
        ...


class _Works:
    """What the backend returns for a transfer, waited for once: a second wait on a gloo work never returns."""

    __slots__ = ("_works",)

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error


class DirectTransport:
    """Hands each transfer to the backend at once, for backends that match sends and receives by themselves (gloo)."""

    # Gloo moves data when both sides have asked for it, so ask early. On stages of microseconds, where latency is all there
    # is, GPipe takes 1.6 times as long with 1 as with 16.
    passes_ahead = 16

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use a group whose other members use this transport too."""
        self._group = group
        self._sends: defaultdict[int, deque[_Works]] = defaultdict(deque)

    # torch.distributed.isend and irecv take five times as long as the group's own methods, in checks and logging.
    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        """Start to send."""
        sends = self._sends[peer]
        try:
            sends.append(_Works([self._group.send([tensor], peer, tag) for tensor in tensors]))
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        while len(sends) > MAX_SENDS_IN_FLIGHT:
            sends.popleft().wait()

    def receive(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Transfer:
        """Start to receive."""
        try:
            return _Works([self._group.recv([tensor], peer, tag) for tensor in tensors])
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error

    def flush(self) -> None:
        """Do nothing: everything has started."""

    def finish(self) -> None:
        """Wait for all sends."""
        for sends in self._sends.values():
            while sends:
                sends.popleft().wait()


class _QueuedTransfer:
    """A transfer of a `BatchedTransport`, which may not have started."""

    __slots__ = ("_transport", "works")

    def __init__(self, transport: "BatchedTransport") -> None:
        self._transport = transport
        self.works: _Works | None = None

    def wait(self) -> None:
        if self.works is None:
            self._transport.flush()
        if self.works is not None:
            self.works.wait()


class BatchedTransport:
    """Starts together what has no computation in between, for backends that run transfers as kernels (NCCL).

    A kernel that sends blocks the ones behind it on its stream until the peer receives. Two ranks that each send first
    would wait for ever; in one batch both directions run at once. All transfers go through batches, also single ones,
    because unbatched ones use other communicators, whose order relative to the batches nobody guarantees.
    """

    # A receive blocks the transfers behind it, so it stays where it is safe.
    passes_ahead = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use a group whose other members use this transport too."""
        self._group = group
        self._queue: list[dist.P2POp] = []
        self._queued: list[_QueuedTransfer] = []
        self._sends: deque[tuple[_QueuedTransfer, list[torch.Tensor]]] = deque()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        """Queue a send."""
        self._sends.append((self._enqueue(dist.isend, tensors, peer, tag), tensors))

    def receive(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Transfer:
        """Queue a receive."""
        return self._enqueue(dist.irecv, tensors, peer, tag)

    # The two functions have no common type that pyright could name.
    def _enqueue(self, operation: object, tensors: list[torch.Tensor], peer: int, tag: int) -> _QueuedTransfer:
        transfer = _QueuedTransfer(self)
        for tensor in tensors:
            self._queue.append(dist.P2POp(operation, tensor, group=self._group, tag=tag, group_peer=peer))  # pyright: ignore[reportArgumentType]
        self._queued.append(transfer)
        return transfer

    def flush(self) -> None:
        """Start the queued transfers as one batch."""
        if not self._queued:
            return
        works = _Works(dist.batch_isend_irecv(self._queue) if self._queue else [])
        for transfer in self._queued:
            transfer.works = works
        self._queue, self._queued = [], []
        while len(self._sends) > MAX_SENDS_IN_FLIGHT:
            self._sends.popleft()[0].wait()

    def finish(self) -> None:
        """Let the stream wait for all sends."""
        self.flush()
        while self._sends:
            self._sends.popleft()[0].wait()


def build_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Build the transport that fits the backend of a group for tensors on a device."""
    return DirectTransport(group) if device.type == "cpu" else BatchedTransport(group)


def close_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make transfers of other ranks with this one fail soon, and the group unusable."""
    if device.type != "cpu":
        group.abort()
        return
    # Gloo's abort reaches nobody (torch 2.13). A wait that runs into its limit closes the connections, which every
    # peer notices at once.
    # A wait on a connection that is gone already leaves the others open, so try all.
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 7_919


class BufferPool:
    """Tensors to receive into, reused within a step and from one step to the next.

    A buffer that is given back may still be in use, by a user who keeps an activation or by a task that keeps a
    gradient. It is handed out again only when nothing else shares its memory. What leaves the pool for code that it does
    not know must therefore be an alias (`detach`), never the buffer itself. Buffers that a whole step has not needed are
    freed, so that steps of ever new shapes do not add up.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate on a device."""
        self._device = device
        self._given_now: _FreeBuffers = defaultdict(deque)
        self._given_before: _FreeBuffers = defaultdict(deque)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content."""
        # Tensors made under inference mode can not be saved for a backward pass, so the modes do not share.
        key = (shape, dtype, torch.is_inference_mode_enabled())
        for free in (self._given_now[key], self._given_before[key]):
            while free:
                buffer = free.popleft()
                if is_unshared(buffer):
                    return buffer
        return torch.empty(shape, dtype=dtype, device=self._device)

    def give_back(self, buffers: list[torch.Tensor]) -> None:
        """Take buffers back; the caller drops them."""
        for buffer in buffers:
            self._given_now[buffer.shape, buffer.dtype, buffer.is_inference()].append(buffer)

    def end_step(self) -> None:
        """Free what the step has not needed."""
        self._given_before, self._given_now = self._given_now, defaultdict(deque)


_FreeBuffers: TypeAlias = defaultdict[tuple[tuple[int, ...], torch.dtype, bool], deque[torch.Tensor]]


def is_unshared(buffer: torch.Tensor) -> bool:
    """Tell whether no other tensor shares the memory of this one."""
    # One user is the tensor, the other one the Python object made here (checked with torch 2.11, 2.13 and 2.14).
    return torch._C._storage_Use_Count(local_tensor(buffer).untyped_storage()._cdata) == 2
