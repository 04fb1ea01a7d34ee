"""How packs get from the data provider to the device, and how their position gets into checkpoints."""

import abc
from collections.abc import Collection, Generator, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import DistributedContext
from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import MicrobatchPack
from d9d.dataset.lanes.lane_pack_stream import LANES_KEY
from d9d.dataset.pack_stream import has_rank_invariant_state, needs_main_thread, state_is_collective
from d9d.loop.component.pack_prefetch import PackPrefetcher, copy_pack

__all__ = [
    "DataParallelMicrobatchPackStream",
    "DevicePackStream",
    "DirectDevicePackStream",
    "PrefetchingDevicePackStream",
    "build_device_pack_stream",
]

_INVARIANT_KEY = "all_ranks"
_LANE_PREFIX = "lane_"


class DataParallelMicrobatchPackStream(MicrobatchPackStream):
    """Gives the position of a stream a key of its own for each data-parallel rank, so that a checkpoint holds them all.

    A stream that declares its state to be the same on all ranks (`RankInvariantStream`) shares one key instead, so that
    another number of ranks can resume it.

    Args:
        dist_context: Topology of the job.
        inner: Stream of this rank.
    """

    def __init__(self, dist_context: DistributedContext, inner: MicrobatchPackStream) -> None:
        self._inner = inner
        self._dp_size = dist_context.dp_size
        self._key = _INVARIANT_KEY if has_rank_invariant_state(inner) else f"dp_{dist_context.dp_rank}"

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        return iter(self._inner)

    @property
    def total_steps(self) -> int | None:
        """Number of packs of the inner stream."""
        return self._inner.total_steps

    @property
    def inner(self) -> MicrobatchPackStream:
        """Stream of this rank."""
        return self._inner

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell whether all ranks share one position."""
        return self._key == _INVARIANT_KEY

    def refuse_other_ranks(self, keys: Collection[str]) -> None:
        """Refuse positions that were saved for other ranks.

        Args:
            keys: Keys of the saved positions.

        Raises:
            ValueError: There is none for this rank.
        """
        if self._key in keys:
            return
        why = (
            "the run was saved with a stream that keeps a position per rank"
            if self.has_rank_invariant_state
            else "a stream that keeps a position per rank cannot be resumed with another number of data-parallel ranks "
            f"(now {self._dp_size})"
        )
        raise ValueError(f"the checkpoint has no data position {self._key!r}, only {sorted(keys)}: {why}.")

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the inner stream under the key of this rank, and states of lanes under keys of their own.

        Lanes are dealt out anew to another number of ranks, so a checkpoint must hold each of them, whoever has it.
        """
        position = self._inner.state_dict()
        if not self.has_rank_invariant_state or LANES_KEY not in position:
            return {self._key: position}
        lanes: dict[str, Any] = position[LANES_KEY]
        of_all = {name: value for name, value in position.items() if name != LANES_KEY}
        return {self._key: of_all, **{f"{_LANE_PREFIX}{lane}": state for lane, state in lanes.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move the inner stream to the position that was saved under the key of this rank.

        Raises:
            ValueError: There is none, since the run had another number of data-parallel ranks.
        """
        self.refuse_other_ranks(state_dict)
        position = state_dict[self._key]
        lanes = {
            key.removeprefix(_LANE_PREFIX): state for key, state in state_dict.items() if key.startswith(_LANE_PREFIX)
        }
        self._inner.load_state_dict({**position, LANES_KEY: lanes} if lanes else position)


class DevicePackStream(abc.ABC, Stateful):
    """Yields packs whose tensors are on the device of this rank.

    Its state is the position after the last pack that it handed out, not after what it read ahead.
    """

    @abc.abstractmethod
    def __iter__(self) -> Generator[MicrobatchPack[Any], None, None]:
        """Yield packs from the current position on. Close the generator to stop early."""

    # `Any`: a stream keeps in its state whatever it needs.
    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last pack that was handed out."""

    @abc.abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. It takes effect at the next `iter()`."""


class DirectDevicePackStream(DevicePackStream):
    """Copies each pack when it is needed, on the current stream.

    Args:
        stream: Packs on the host.
        device: Device to copy them to.
    """

    def __init__(self, stream: MicrobatchPackStream, device: torch.types.Device) -> None:
        self._stream = stream
        self._device = _concrete(device)

    def __iter__(self) -> Generator[MicrobatchPack[Any], None, None]:
        for pack in self._stream:
            yield copy_pack(pack, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the inner stream, which is never ahead."""
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move the inner stream to a saved position."""
        self._stream.load_state_dict(state_dict)


class PrefetchingDevicePackStream(DevicePackStream):
    """Reads and copies packs ahead in a background thread, on a stream of its own.

    [Note: positions of a stream that is read ahead]
    The thread notes the state of the inner stream with each pack, and the state of this object is the note that came with
    the last pack handed out. When an iteration stops early, the inner stream is ahead of it; the next one moves it back.

    Args:
        stream: Packs on the host. While an iteration runs, the background thread alone uses it.
        device: Device to copy them to.
        prefetch_factor: Number of packs to hold ready, at least 1.
    """

    def __init__(self, stream: MicrobatchPackStream, device: torch.types.Device, prefetch_factor: int) -> None:
        if prefetch_factor < 1:
            raise ValueError(f"prefetch_factor ({prefetch_factor}) must be at least 1; 0 asks for a direct stream.")
        self._stream = stream
        self._device = _concrete(device)
        self._prefetch_factor = prefetch_factor
        self._is_iterating = False
        self._position: dict[str, Any] | None = None
        """Position after the last pack handed out; None while it is that of the inner stream."""

    def __iter__(self) -> Generator[MicrobatchPack[Any], None, None]:
        if self._is_iterating:
            raise RuntimeError("the stream is being read already: close that iterator first.")
        if self._position is None:
            self._position = self._stream.state_dict()
        else:
            self._stream.load_state_dict(self._position)
        self._is_iterating = True
        prefetcher = PackPrefetcher(self._stream, self._device, self._prefetch_factor)
        try:
            with prefetcher:
                for pack, position in prefetcher:
                    self._position = position
                    yield pack
        finally:
            self._is_iterating = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last pack that was handed out."""
        return self._stream.state_dict() if self._position is None else self._position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            RuntimeError: An iteration is running.
        """
        if self._is_iterating:
            raise RuntimeError("a stream that is being read cannot be moved: close its iterator first.")
        self._stream.load_state_dict(state_dict)
        self._position = None


def build_device_pack_stream(
    stream: MicrobatchPackStream, device: torch.types.Device, prefetch_factor: int
) -> DevicePackStream:
    """Build the stream that feeds the device.

    Args:
        stream: Packs on the host.
        device: Device to copy them to.
        prefetch_factor: Packs to hold ready; 0 copies each when it is needed, without a thread. So is a stream that has to
            be read on the main thread (`MainThreadStream`), and one whose state is collective: a thread would ask for it
            at other times on each rank.
    """
    if prefetch_factor == 0 or needs_main_thread(stream) or state_is_collective(stream):
        return DirectDevicePackStream(stream, device)
    return PrefetchingDevicePackStream(stream, device, prefetch_factor)


def _concrete(device: torch.types.Device) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
