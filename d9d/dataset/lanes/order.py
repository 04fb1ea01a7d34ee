"""Which sample stands at which position of a run."""

import enum
import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from d9d.dataset.lanes.permutation import Permutation

__all__ = ["SampleOrder", "Tail"]

_NUM_CACHED_EPOCHS = 4

_Offsets = TypeVar("_Offsets", int, npt.NDArray[np.int64])


class Tail(enum.StrEnum):
    """Names what happens to samples at the end of an epoch that do not fill a global batch."""

    wrap = "wrap"
    """They form a global batch together with the first samples of the next epoch: each epoch holds each sample once."""
    drop = "drop"
    """They are left out. Which ones these are changes with every shuffle."""
    pad = "pad"
    """They are filled up with samples of the same epoch that weigh nothing: right for evaluation."""
    short = "short"
    """They form a step of their own, with fewer samples: each epoch holds each sample once, and ends with a step."""


class SampleOrder:
    """Tells the sample and the weight at each position of a run, without storing an order.

    A position counts samples from the start of the run over all ranks and epochs. Position p is in epoch p // E, where E
    is the number of samples N for `Tail.wrap`, and N rounded to whole global batches G for the others: down for `drop`,
    up for `pad` and `short`. With `short`, nobody reads the positions of an epoch from N on.

    [Note: chunks]
    With C chunks, the samples of an epoch that fill whole steps are cut into C blocks of neighbours, and each step takes
    the next G / C samples of every block, one block after the other. What does not fill a step comes last. If each lane
    has a chunk, a rank reads few places of the dataset from front to back, and steps are the same for any number of ranks.

    Args:
        num_samples: Number of samples of the dataset.
        seed: Seed of the shuffle.
        shuffle: Draw another permutation for each epoch, instead of reading in dataset order.
        tail: What happens at the end of an epoch.
        global_batch_size: Samples per step; `Tail.wrap` does not depend on it.
        num_chunks: Blocks that are read in parallel, or 0 to read in one go; divides the global batch. See [Note: chunks].
    """

    def __init__(
        self, *, num_samples: int, seed: int, shuffle: bool, tail: Tail, global_batch_size: int, num_chunks: int = 0
    ) -> None:
        self._num_samples = num_samples
        self._tail = tail
        self._global_batch_size = global_batch_size
        self._num_chunks = num_chunks
        self._seed = seed
        self._shuffle = shuffle
        num_full, rest = divmod(num_samples, global_batch_size)
        match tail:
            case Tail.wrap:
                self._epoch_length = num_samples
            case Tail.drop:
                self._epoch_length = num_full * global_batch_size
            case Tail.pad | Tail.short:
                self._epoch_length = (num_full + (rest > 0)) * global_batch_size

    @property
    def epoch_length(self) -> int:
        """Number of positions of an epoch, padding included."""
        return self._epoch_length

    @property
    def num_padding(self) -> int:
        """Number of positions at the end of each epoch that repeat samples with weight 0."""
        return self._epoch_length - self._num_samples if self._tail is Tail.pad else 0

    @property
    def num_in_short_step(self) -> int:
        """Number of samples of the last step of each epoch if it has fewer than the others, and 0 otherwise."""
        return self._num_samples % self._global_batch_size if self._tail is Tail.short else 0

    @property
    def num_dropped(self) -> int:
        """Number of samples that each epoch leaves out."""
        return max(0, self._num_samples - self._epoch_length)

    def samples(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample index at each position.

        Args:
            positions: Positions of the run, in any order; shape (B,).
        """
        epochs, offsets = np.divmod(positions, self._epoch_length)
        offsets %= self._num_samples  # padding starts over
        if self._num_chunks:
            offsets = np.where(offsets < self._num_in_whole_steps, self._in_chunks(offsets), offsets)
        if not self._shuffle:
            return offsets
        result = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            is_here = epochs == epoch
            result[is_here] = _permutation(self._num_samples, self._seed, epoch).take(offsets[is_here])
        return result

    def sample(self, position: int) -> int:
        """Return the sample index at one position, which is faster than `samples` for a few."""
        epoch, offset = divmod(position, self._epoch_length)
        offset %= self._num_samples
        if self._num_chunks and offset < self._num_in_whole_steps:
            offset = self._in_chunks(offset)
        return _permutation(self._num_samples, self._seed, epoch)[offset] if self._shuffle else offset

    @property
    def _num_in_whole_steps(self) -> int:
        return self._num_samples // self._global_batch_size * self._global_batch_size

    def _in_chunks(self, offsets: _Offsets) -> _Offsets:
        """Place offsets of an epoch, all within whole steps, into chunks. See [Note: chunks]."""
        run = self._global_batch_size // self._num_chunks
        step, offset = offsets // self._global_batch_size, offsets % self._global_batch_size
        return (offset // run * (self._num_samples // self._global_batch_size) + step) * run + offset % run

    def num_read(self, start: int, size: int) -> int:
        """Return how many of the positions from `start` on are read; they are all in one step, whose samples come first.

        Args:
            start: First position.
            size: Number of positions.
        """
        if self._tail is not Tail.short:
            return size
        return min(max(self._num_samples - start % self._epoch_length, 0), size)

    def weights(self, positions: Sequence[int]) -> list[float]:
        """Return 1 for each position that holds a sample, and 0 for padding."""
        return [float(position % self._epoch_length < self._num_samples) for position in positions]


@functools.lru_cache(maxsize=_NUM_CACHED_EPOCHS)
def _permutation(num_samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_samples, seed, epoch)
