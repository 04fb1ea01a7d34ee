"""The background thread that reads packs ahead.

[Note: threads and streams of the prefetcher]
The background thread is the only one that touches the inner stream. It copies each pack on a device stream of its own and
records an event behind the copy. The training thread makes its current stream wait for the event, without waiting itself,
and tells the allocator that it uses the tensors, so that their memory is not given away while queued work reads them.
On CPU there are no streams, and a pack is passed on as it is.
A slot is taken before a pack is read, so that never more than `num_ready` packs wait besides the one in use.
"""

import copy
import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from d9d.core.device import side_stream
from d9d.core.protocol import MicrobatchPackStream
from d9d.core.pytree import tree_leaves, tree_map_only
from d9d.core.types import MicrobatchPack

__all__ = ["PackPrefetcher", "copy_pack"]

_THREAD_NAME = "d9d-pack-prefetch"
_LIMIT_AFTER_FAILURE_S = 5.0
"""Time that a loader has to end when the job fails."""


def copy_pack(pack: MicrobatchPack[Any], device: torch.device) -> MicrobatchPack[Any]:
    """Copy the tensors of a pack to a device, without waiting for the copy. Everything else passes as it is."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), pack)


class _Ready(NamedTuple):
    pack: MicrobatchPack[Any]
    position: dict[str, Any]
    is_copied: torch.Event | None


class _Failed(NamedTuple):
    error: BaseException


class _End(NamedTuple):
    pass


class PackPrefetcher:
    """Runs a thread for the time of its context that reads packs and the position after each.

    An exception in the thread is raised where the next pack is asked for, with the traceback of the thread. Leaving the
    context stops the thread: it ends when the pack that it is reading is there.

    Args:
        stream: Packs on the host.
        device: Device to copy them to.
        num_ready: Number of packs to hold ready.
    """

    def __init__(self, stream: MicrobatchPackStream, device: torch.device, num_ready: int) -> None:
        self._stream = stream
        self._device = device
        # Unbounded, so that the thread never blocks on it; the slots bound what is in it.
        self._ready: queue.SimpleQueue[_Ready | _Failed | _End] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(num_ready)
        self._is_stopped = threading.Event()
        # A daemon, so that a loader that hangs cannot keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        self._free_slots.release()
        # A loader that hangs must not hide the error that ends the job.
        self._thread.join(None if exc is None else _LIMIT_AFTER_FAILURE_S)

    def __iter__(self) -> Iterator[tuple[MicrobatchPack[Any], dict[str, Any]]]:
        while True:
            match self._ready.get():
                case _Ready(pack, position, is_copied):
                    if is_copied is not None:
                        _use_on_current_stream(pack, is_copied, self._device)
                    self._free_slots.release()
                    yield pack, position
                case _Failed(error):
                    raise error
                case _End():
                    return

    def _run(self) -> None:
        try:
            with side_stream(self._device) as stream:
                self._read_all(stream)
        except BaseException as error:  # noqa: BLE001 - handed over to the training thread, which raises it
            self._ready.put(_Failed(error))
        else:
            self._ready.put(_End())

    def _read_all(self, stream: torch.Stream | None) -> None:
        packs = iter(self._stream)
        while True:
            self._free_slots.acquire()
            if self._is_stopped.is_set():
                return
            pack = next(packs, None)
            if pack is None:
                return
            # The inner stream may go on writing into what it returned.
            position = copy.deepcopy(self._stream.state_dict())
            on_device = copy_pack(pack, self._device)
            is_copied = None if stream is None else stream.record_event()
            self._ready.put(_Ready(on_device, position, is_copied))


def _use_on_current_stream(pack: MicrobatchPack[Any], is_copied: torch.Event, device: torch.device) -> None:
    current = torch.accelerator.current_stream(device)
    current.wait_event(is_copied)
    for leaf in tree_leaves(pack):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)
