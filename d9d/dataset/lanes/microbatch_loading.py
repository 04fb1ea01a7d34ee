"""Loads whole microbatches from their position, in a loader process or in the one that trains."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import Dataset

from d9d.core.types import CollateFn, IdleMicrobatch
from d9d.dataset.lanes.generators import (
    KeptGenerators,
    may_seed_generators,
    seed_generators,
    seed_torch_generator,
)
from d9d.dataset.lanes.order import SampleOrder
from d9d.dataset.lanes.sample_loading import (
    MapDataset,
    SampleError,
    SampleSeeds,
    SeededDataset,
)

__all__ = [
    "AttachWeights",
    "BatchedDataset",
    "MicrobatchLoader",
    "MicrobatchRequest",
    "add_weights",
    "describe_request",
    "microbatch_requests",
]

# `Any`: a microbatch is whatever the collate function returns.
AttachWeights: TypeAlias = Callable[[Any, torch.Tensor], Any]
"""Puts the weights of samples, float32 of shape (B,), into a microbatch, and returns it."""

_BLOCK = 4096
"""Positions that are turned into samples at a time: the cost per call is spread over many."""


@runtime_checkable
class BatchedDataset(Protocol):
    """Describes a dataset that loads many samples at once, as PyTorch's loaders ask for it."""

    def __getitems__(self, indices: list[int]) -> list[Any]:  # samples are of any type
        """Load samples."""
        ...


class MicrobatchRequest(NamedTuple):
    """Asks for the samples of one microbatch. It travels to loader processes."""

    start: int
    """Position of the first sample in the run; the others follow it."""
    samples: list[int]
    """Index of each sample."""
    is_idle: bool = False
    """Whether the samples are those of another microbatch, see `IdleMicrobatch`."""


def microbatch_requests(
    order: SampleOrder, starts: Iterable[int], microbatch_size: int, num_samples: int
) -> Iterator[MicrobatchRequest]:
    """Yield the samples of microbatches.

    Args:
        order: Tells the sample at each position.
        starts: First position of each microbatch; may be endless.
        microbatch_size: Samples per microbatch.
        num_samples: Samples of the dataset. Blocks do not span many epochs, each of which has a price of its own.
    """
    remaining = iter(starts)
    per_block = max(1, min(_BLOCK, 4 * num_samples) // microbatch_size)
    offsets = np.arange(microbatch_size, dtype=np.int64)
    while block := list(itertools.islice(remaining, per_block)):
        positions = np.array(block, dtype=np.int64)[:, None] + offsets  # (microbatches, B)
        samples = cast("list[list[int]]", order.samples(positions.reshape(-1)).reshape(positions.shape).tolist())
        if not order.num_in_short_step:
            yield from map(MicrobatchRequest, block, samples)
            continue
        for start, indices in zip(block, samples, strict=True):
            num_read = order.num_read(start, microbatch_size)
            if num_read:
                yield MicrobatchRequest(start, indices[:num_read])
            else:
                yield _idle_request(order, start, microbatch_size)


def _idle_request(order: SampleOrder, start: int, microbatch_size: int) -> MicrobatchRequest:
    """Ask for the last microbatch of an epoch instead of one behind it."""
    while not (num_read := order.num_read(start, microbatch_size)):
        start -= microbatch_size
    positions = np.arange(start, start + num_read, dtype=np.int64)
    return MicrobatchRequest(start, order.samples(positions).tolist(), is_idle=True)


def add_weights(microbatch: dict[str, Any], weights: torch.Tensor, key: str = "sample_weight") -> dict[str, Any]:
    """Put the weights of samples into a microbatch that is a dict; for another key, wrap it in `functools.partial`."""
    return {**microbatch, key: weights}


class MicrobatchLoader(Dataset[Any]):
    """Shows a dataset whose items are collated microbatches. It travels to loader processes.

    [Note: seeding only what draws]
    Seeding NumPy and Python for each microbatch takes longer than loading small samples, most of which draw no random
    numbers. So loading begins without, and watches these generators. A microbatch that has drawn from them is dropped and
    loaded once more with seeds, as all after it are: what comes out is the same as with seeds from the start. PyTorch's
    generator is seeded fast, and always: one may ask for its seed (`torch.initial_seed`), which leaves no trace. A dataset
    with a state is seeded from the start: loading twice would move it twice.

    Args:
        dataset: Map-style dataset.
        collate_fn: Makes a microbatch from its samples.
        order: Tells the weight at each position.
        seeds: Seed of each position.
        attach_weights: Puts the weights of samples into microbatches, or None to leave them out.
        generators: Block to seed the global generators in for each microbatch, or None to leave them alone. Who loads
            begins it; in a loader process, the first microbatch does.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: CollateFn,
        order: SampleOrder,
        seeds: SampleSeeds,
        attach_weights: AttachWeights | None,
        generators: KeptGenerators | None,
    ) -> None:
        # Looked up once: asking a protocol takes longer than loading many a sample.
        self._seeded = dataset if isinstance(dataset, SeededDataset) else None
        self._batched = dataset if isinstance(dataset, BatchedDataset) and self._seeded is None else None
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._order = order
        self._seeds = seeds
        self._attach_weights = attach_weights
        self._generators = generators
        self._seeds_all = isinstance(dataset, Stateful)

    def __getitem__(self, request: MicrobatchRequest) -> Any:  # noqa: ANN401 - see `AttachWeights`
        generators = self._generators
        if generators is None or not may_seed_generators():
            return self._load(request)
        seed = self._seeds.at(request.start)
        if not self._seeds_all:
            # See [Note: seeding only what draws].
            generators.keep_for_good()
            seed_torch_generator(seed)
            microbatch = self._load(request)
            if not generators.have_drawn():
                return microbatch
            self._seeds_all = True
        seed_generators(seed)
        return self._load(request)

    def _load(self, request: MicrobatchRequest) -> Any:  # noqa: ANN401 - see `AttachWeights`
        samples = self._load_samples(request)
        try:
            microbatch = self._collate_fn(samples)
        except Exception as error:
            raise SampleError(f"{describe_request(request)} could not be collated: {error!r}") from error
        if self._attach_weights is not None:
            positions = range(request.start, request.start + len(request.samples))
            weights = torch.tensor(self._order.weights(positions), dtype=torch.float32)
            microbatch = self._attach_weights(microbatch, weights)
        return IdleMicrobatch(microbatch) if request.is_idle else microbatch

    def _load_samples(self, request: MicrobatchRequest) -> list[Any]:
        if self._batched is not None:
            try:
                return self._batched.__getitems__(request.samples)
            except Exception as error:
                raise SampleError(f"{describe_request(request)} could not be loaded: {error!r}") from error
        samples: list[Any] = []
        try:
            # Not a comprehension: how many have been loaded tells which one failed.
            if self._seeded is None:
                for index in request.samples:
                    samples.append(self._dataset[index])  # noqa: PERF401
            else:
                for position, index in enumerate(request.samples, start=request.start):
                    samples.append(self._seeded.getitem_seeded(index, self._seeds.at(position)))
        except Exception as error:
            offset = len(samples)
            raise SampleError(
                f"sample {request.samples[offset]} of the dataset (position {request.start + offset} of the run) could "
                f"not be loaded: {error!r}"
            ) from error
        return samples


def describe_request(request: MicrobatchRequest) -> str:
    """Name the samples and positions of a request, for messages."""
    last = request.start + len(request.samples) - 1
    shown = ", ".join(map(str, request.samples[:8]))
    more = f" and {len(request.samples) - 8} more" if len(request.samples) > 8 else ""
    return f"samples {shown}{more} of the dataset (positions {request.start} to {last} of the run)"
