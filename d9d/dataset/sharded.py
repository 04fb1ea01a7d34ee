"""Views of a map-style dataset: one shard of it, or an order that groups samples of similar length."""

import enum
import functools
import hashlib
import math
from collections.abc import Sized
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import Dataset

from d9d.core.dist_context import DistributedContext

__all__ = [
    "BufferSortedDataset",
    "DatasetImplementingSortKeyProtocol",
    "ShardIndexingMode",
    "ShardedDataset",
    "dataset_length",
    "derive_seed",
    "refuse_changed_state",
    "shard_dataset_data_parallel",
    "shard_index",
]

_T_co = TypeVar("_T_co", covariant=True)

_DEFAULT_SORT_SEED = 0
"""Seed of `BufferSortedDataset` when none is given: all ranks must agree on the order without talking to each other."""


class ShardIndexingMode(enum.StrEnum):
    """Names the ways to deal samples out to shards."""

    sequential = "sequential"
    """In turn: shard r of n holds samples r, r + n, r + 2n, ..."""
    chunked = "chunked"
    """In blocks of neighbours: shard 0 holds the first ones, the last shard the last ones."""


def refuse_changed_state(what: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to resume from a state that describes other data.

    Args:
        what: Name of the object whose state it is, for the message.
        saved: State from the checkpoint.
        current: Values of this job; keys that `saved` lacks or that differ are refused.

    Raises:
        ValueError: Names every value that differs, with the saved and the current one.
    """
    changes = [
        f"{name} (checkpoint: {saved.get(name, 'missing')}, now: {value})"
        for name, value in current.items()
        if name not in saved or saved[name] != value
    ]
    if changes:
        raise ValueError(
            f"{what} cannot resume, since its data position would mean other samples. Changed: {', '.join(changes)}. "
            "Restore the saved values, or start a new run."
        )


def dataset_length(dataset: object) -> int:
    """Return the number of samples of a map-style dataset.

    Raises:
        TypeError: The dataset has no length.
    """
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"{type(dataset).__name__} has no __len__(): a dataset that is sharded or shuffled by index must have one. "
            "For streaming data, write a data provider that returns a MicrobatchPackStream."
        )
    return len(dataset)


def shard_index(index: int, num_samples: int, total_shards: int, shard: int, mode: ShardIndexingMode) -> int:
    """Return the dataset index of a sample of a shard.

    An index one past the end of a shard that is smaller than others is its padding: a sample from the start of the data.
    """
    if mode is ShardIndexingMode.sequential:
        # Past the end only in padding, which starts over.
        return (index * total_shards + shard) % num_samples
    base, num_larger = divmod(num_samples, total_shards)
    if index >= _shard_size(num_samples, total_shards, shard):
        return (shard - num_larger) % num_samples
    return shard * base + min(shard, num_larger) + index


def _shard_size(num_samples: int, total_shards: int, shard: int) -> int:
    base, num_larger = divmod(num_samples, total_shards)
    return base + 1 if shard < num_larger else base


class ShardedDataset(Dataset[_T_co], Stateful):
    """Shows one shard of a map-style dataset.

    Without padding, the shards hold each sample exactly once and their sizes differ by at most one. With padding, shorter
    shards repeat samples from the start of the dataset, so that all sizes are equal.

    Args:
        dataset: Dataset to shard; it must have a length.
        total_shards: Number of shards.
        current_shard: Zero-based index of the shard to show.
        indexing_mode: Which samples belong to which shard.
        pad_to_equal_size_across_shards: Repeat samples until all shards have the same size.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        total_shards: int,
        current_shard: int,
        indexing_mode: ShardIndexingMode,
        pad_to_equal_size_across_shards: bool,
    ) -> None:
        if total_shards < 1:
            raise ValueError(f"total_shards ({total_shards}) must be at least 1.")
        if not 0 <= current_shard < total_shards:
            raise ValueError(f"current_shard ({current_shard}) must be from 0 to {total_shards - 1}.")
        self._dataset = dataset
        self._num_samples = dataset_length(dataset)
        self._total_shards = total_shards
        self._current_shard = current_shard
        self._mode = ShardIndexingMode(indexing_mode)
        self._pad = pad_to_equal_size_across_shards
        if self._pad and self._num_samples == 0:
            raise ValueError("an empty dataset cannot be padded: it has no samples to repeat.")

    def __len__(self) -> int:
        if self._pad:
            return math.ceil(self._num_samples / self._total_shards)
        return _shard_size(self._num_samples, self._total_shards, self._current_shard)

    def __getitem__(self, index: int) -> _T_co:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside a shard of {len(self)} samples.")
        base_index = shard_index(
            index % len(self), self._num_samples, self._total_shards, self._current_shard, self._mode
        )
        return self._dataset[base_index]

    def state_dict(self) -> dict[str, Any]:
        """Return what identifies the shard, and the state of the dataset if it has one."""
        state: dict[str, Any] = self._identity()
        if isinstance(self._dataset, Stateful):
            state["dataset"] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the dataset.

        Raises:
            ValueError: The state is of another shard, or of a dataset with another length.
        """
        refuse_changed_state("ShardedDataset", state_dict, self._identity())
        if isinstance(self._dataset, Stateful):
            self._dataset.load_state_dict(state_dict["dataset"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_samples": self._num_samples,
            "total_shards": self._total_shards,
            "current_shard": self._current_shard,
            "indexing_mode": self._mode.value,
            "pad_to_equal_size_across_shards": self._pad,
        }


def shard_dataset_data_parallel(
    dataset: Dataset[_T_co],
    dist_context: DistributedContext,
    indexing_mode: ShardIndexingMode = ShardIndexingMode.sequential,
    pad_to_equal_size_across_shards: bool = True,
) -> Dataset[_T_co]:
    """Show the shard of this rank's data-parallel coordinate.

    Ranks that differ only in their pipeline, context or tensor coordinate get the same shard. Not collective.

    Args:
        dataset: Dataset to shard, the same on every rank.
        dist_context: Topology of the job.
        indexing_mode: Which samples belong to which shard.
        pad_to_equal_size_across_shards: Repeat samples until all shards have the same size, so that all ranks run the
            same number of steps.
    """
    return ShardedDataset(
        dataset=dataset,
        total_shards=dist_context.dp_size,
        current_shard=dist_context.dp_rank,
        indexing_mode=indexing_mode,
        pad_to_equal_size_across_shards=pad_to_equal_size_across_shards,
    )


class DatasetImplementingSortKeyProtocol(Protocol[_T_co]):
    """Describes a map-style dataset that can tell how large a sample is without loading it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> _T_co:
        """Load a sample."""
        ...

    # `Any`: keys of any type will do, as long as they compare with each other.
    def sort_key(self, index: int) -> Any:  # noqa: ANN401
        """Return the key of a sample, such as its length, without loading the sample."""
        ...


class BufferSortedDataset(Dataset[_T_co], Stateful):
    """Reorders a dataset so that neighbours are of similar size, which saves padding.

    Runs of `buffer_size` neighbours are sorted by key and cut into packs of `pack_size`; the packs of a buffer then
    follow each other in random order, so that batch sizes do not grow over a buffer. A pack that is not full is the last
    of its buffer. Each sample appears exactly once. The order depends on the arguments and on nothing else: it is the
    same on every rank, in every loader worker and after a resume, and samples can be read in any order.

    Wrap it before sharding, not after, and leave shuffling off: a shuffle would undo the packs.

    Args:
        base_dataset: Dataset to reorder.
        buffer_size: Number of neighbours that are sorted together. A multiple of `pack_size` keeps packs aligned.
        pack_size: Number of samples of a pack; the global batch size is a good value.
        init_seed: Seed of the order. Default: a fixed one, the same in every process.
    """

    def __init__(
        self,
        base_dataset: DatasetImplementingSortKeyProtocol[_T_co],
        buffer_size: int,
        pack_size: int,
        init_seed: int | None = None,
    ) -> None:
        for name, value in {"buffer_size": buffer_size, "pack_size": pack_size}.items():
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1.")
        self._base = base_dataset
        self._num_samples = len(base_dataset)
        self._buffer_size = buffer_size
        self._pack_size = pack_size
        self._seed = _DEFAULT_SORT_SEED if init_seed is None else init_seed
        # Two buffers: readers walk in order, and a batch can span the border between two.
        self._buffer_order = functools.lru_cache(maxsize=2)(self._compute_buffer_order)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> _T_co:
        if not -self._num_samples <= index < self._num_samples:
            raise IndexError(f"index {index} is outside a dataset of {self._num_samples} samples.")
        buffer, offset = divmod(index % self._num_samples, self._buffer_size)
        return self._base[self._buffer_order(buffer)[offset]]

    def _compute_buffer_order(self, buffer: int) -> list[int]:
        start = buffer * self._buffer_size
        indices = range(start, min(start + self._buffer_size, self._num_samples))
        generator = torch.Generator().manual_seed(derive_seed(self._seed, buffer))
        # Samples with equal keys come in random order: a stable sort of shuffled indices.
        shuffled = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
        ordered = sorted(shuffled, key=self._base.sort_key)
        packs = [ordered[at : at + self._pack_size] for at in range(0, len(ordered), self._pack_size)]
        num_full = len(ordered) // self._pack_size
        pack_order = torch.randperm(num_full, generator=generator).tolist()
        return [index for pack in [*pack_order, *range(num_full, len(packs))] for index in packs[pack]]

    # A cached method of this object cannot be pickled for loader workers; each of them makes its own.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_buffer_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._buffer_order = functools.lru_cache(maxsize=2)(self._compute_buffer_order)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on."""
        state: dict[str, Any] = self._identity()
        if isinstance(self._base, Stateful):
            state["dataset"] = cast("Stateful", self._base).state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the order is still the saved one.

        Raises:
            ValueError: The saved order was another one.
        """
        refuse_changed_state("BufferSortedDataset", state_dict, self._identity())
        if isinstance(self._base, Stateful):
            cast("Stateful", self._base).load_state_dict(state_dict["dataset"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_samples": self._num_samples,
            "buffer_size": self._buffer_size,
            "pack_size": self._pack_size,
            "init_seed": self._seed,
        }


def derive_seed(seed: int, *path: int) -> int:
    """Mix a seed with the place that it is used at, so that neighbouring places get unrelated generators."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *path))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
