"""Streams of packs: the microbatches of one step on one rank."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch

from d9d.core.device import pin_memory_supported, resolve_device_type
from d9d.core.dist_context import DistributedContext
from d9d.core.protocol import DataLoaderProtocol, MicrobatchPackStream
from d9d.core.pytree import tree_map_only
from d9d.core.types import MicrobatchPack

__all__ = [
    "CollectiveStateStream",
    "FixedCountMicrobatchPacker",
    "MainThreadStream",
    "PinMemoryMicrobatchPackStream",
    "RankInvariantStream",
    "SampleCountStream",
    "SampleDigestStream",
    "WrappingStream",
    "has_rank_invariant_state",
    "needs_main_thread",
    "num_microbatches_for_global_batch",
    "sample_count_of",
    "sample_digest_of",
    "state_is_collective",
]


@runtime_checkable
class WrappingStream(Protocol):
    """Describes a stream that changes packs of another one; what is asked of it, that one can answer."""

    @property
    def inner(self) -> MicrobatchPackStream:
        """Return the other stream."""
        ...


def _layers(stream: object) -> Iterator[object]:
    """Yield a stream and those that it wraps, the outermost first."""
    yield stream
    while isinstance(stream, WrappingStream):
        stream = stream.inner
        yield stream


@runtime_checkable
class RankInvariantStream(Protocol):
    """Describes a stream whose state may be the same on all ranks, so that it can be resumed by any number of them."""

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell whether `state_dict` returns the same on every rank."""
        ...


def has_rank_invariant_state(stream: object) -> bool:
    """Tell whether a stream declares that its state is the same on all ranks."""
    return any(isinstance(layer, RankInvariantStream) and layer.has_rank_invariant_state for layer in _layers(stream))


@runtime_checkable
class CollectiveStateStream(Protocol):
    """Describes a stream whose state may have to be asked for by all ranks together."""

    @property
    def state_is_collective(self) -> bool:
        """Tell whether `state_dict` communicates: then nobody may read ahead of the step that is trained on."""
        ...


def state_is_collective(stream: object) -> bool:
    """Tell whether a stream declares that all ranks must ask for its state together, behind the same step."""
    return any(isinstance(layer, CollectiveStateStream) and layer.state_is_collective for layer in _layers(stream))


@runtime_checkable
class SampleCountStream(Protocol):
    """Describes a stream that knows, without reading, how many samples its steps hold."""

    def num_samples_of(self, num_steps: int) -> int:
        """Return the number of samples of the first steps of the run over all ranks."""
        ...


def sample_count_of(stream: object) -> Callable[[int], int] | None:
    """Return what tells the number of samples of the first steps of the run, or None if the stream does not know it."""
    return next((layer.num_samples_of for layer in _layers(stream) if isinstance(layer, SampleCountStream)), None)


@runtime_checkable
class MainThreadStream(Protocol):
    """Describes a stream that may have to be read on the main thread."""

    @property
    def needs_main_thread(self) -> bool:
        """Tell whether reading uses what belongs to the main thread, such as the global generators of random numbers."""
        ...


def needs_main_thread(stream: object) -> bool:
    """Tell whether a stream has to be read on the main thread."""
    return any(isinstance(layer, MainThreadStream) and layer.needs_main_thread for layer in _layers(stream))


@runtime_checkable
class SampleDigestStream(Protocol):
    """Describes a stream that can tell, without reading, whether two ranks read the same samples in a step."""

    def sample_digest(self, step: int) -> int:
        """Return a number below 2**63 that changes with the samples of a zero-based step on this rank."""
        ...


def sample_digest_of(stream: object) -> Callable[[int], int] | None:
    """Return what tells the digest of a zero-based step, or None if the stream does not know it."""
    return next((layer.sample_digest for layer in _layers(stream) if isinstance(layer, SampleDigestStream)), None)


def num_microbatches_for_global_batch(
    dist_context: DistributedContext, global_batch_size: int, microbatch_size: int
) -> int:
    """Return the number of microbatches per step on one rank, which is the gradient accumulation factor.

    Args:
        dist_context: Topology of the job.
        global_batch_size: Samples per step over all ranks.
        microbatch_size: Samples per microbatch.

    Raises:
        ValueError: The global batch is not a multiple of the data-parallel degree times the microbatch size.
    """
    problems = global_batch_problems(dist_context.dp_size, global_batch_size, microbatch_size)
    if problems:
        raise ValueError(" ".join(problems))
    return global_batch_size // (dist_context.dp_size * microbatch_size)


def global_batch_problems(dp_size: int, global_batch_size: int, microbatch_size: int) -> list[str]:
    """Return why a global batch cannot be dealt out to data-parallel ranks, if it cannot."""
    problems = [
        f"{name} ({value}) must be at least 1."
        for name, value in {"global_batch_size": global_batch_size, "microbatch_size": microbatch_size}.items()
        if value < 1
    ]
    if problems:
        return problems
    per_round = dp_size * microbatch_size
    count, rest = divmod(global_batch_size, per_round)
    if rest:
        valid = " or ".join(str(n * per_round) for n in (count, count + 1) if n > 0)
        problems.append(
            f"global_batch_size ({global_batch_size}) is not a multiple of data_parallel * microbatch_size "
            f"({dp_size} * {microbatch_size} = {per_round}). Use {valid}."
        )
    return problems


class FixedCountMicrobatchPacker(MicrobatchPackStream):
    """Groups the microbatches of a loader into packs of the same count.

    The stream ends with the loader. All ranks must have loaders of the same length.

    Args:
        loader: Yields the microbatches of this rank.
        microbatches_per_step: Number of microbatches of a pack.
        drop_last: Leave out a last pack that is not full, instead of yielding it with fewer microbatches.
    """

    def __init__(self, loader: DataLoaderProtocol, microbatches_per_step: int, drop_last: bool = True) -> None:
        if microbatches_per_step < 1:
            raise ValueError(f"microbatches_per_step ({microbatches_per_step}) must be at least 1.")
        self._loader = loader
        self._microbatches_per_step = microbatches_per_step
        self._drop_last = drop_last

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell whether the state of the loader is the same on every rank."""
        return has_rank_invariant_state(self._loader)

    # `Any`: microbatches are of whatever type the collate function returns.
    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        pack: list[Any] = []
        for microbatch in self._loader:
            pack.append(microbatch)
            if len(pack) == self._microbatches_per_step:
                yield tuple(pack)
                pack = []
        if pack and not self._drop_last:
            yield tuple(pack)

    @property
    def total_steps(self) -> int | None:
        """Number of packs of one pass over the loader, or None if the loader has no length."""
        num_microbatches = _length_or_none(self._loader)
        if num_microbatches is None:
            return None
        if self._drop_last:
            return num_microbatches // self._microbatches_per_step
        return -(-num_microbatches // self._microbatches_per_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last pack that was handed out."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. It takes effect at the next `iter()`."""
        self._loader.load_state_dict(state_dict)


class PinMemoryMicrobatchPackStream(MicrobatchPackStream):
    """Copies packs to page-locked memory, from where copies to the device do not block the host.

    Where the device gains nothing from it, such as on CPU, packs pass unchanged.

    Args:
        inner: Stream of packs in ordinary memory.
        is_supported: Whether the device profits from page-locked memory. Default: ask the device of this process.
    """

    def __init__(self, inner: MicrobatchPackStream, is_supported: bool | None = None) -> None:
        self._inner = inner
        self._is_supported = _device_profits_from_pinning() if is_supported is None else is_supported

    @property
    def inner(self) -> MicrobatchPackStream:
        """Stream of packs in ordinary memory."""
        return self._inner

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        for pack in self._inner:
            yield tree_map_only(torch.Tensor, torch.Tensor.pin_memory, pack) if self._is_supported else pack

    @property
    def total_steps(self) -> int | None:
        """Number of packs of the inner stream."""
        return self._inner.total_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the inner stream."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move the inner stream to a saved position."""
        self._inner.load_state_dict(state_dict)


def _length_or_none(loader: object) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:
        # What torch's DataLoader raises over data of unknown length, which is valid here.
        return None


def _device_profits_from_pinning() -> bool:
    return pin_memory_supported(torch.device(resolve_device_type()))
