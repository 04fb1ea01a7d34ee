"""Which sample stands at which position of a run."""

import enum
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from d9d.dataset.lanes.permutation import Permutation

__all__ = ["SampleOrder", "Tail"]

_NUM_CACHED_EPOCHS = 4


class Tail(enum.StrEnum):
    """Names what happens to samples at the end of an epoch that do not fill a global batch."""

    wrap = "wrap"
    """They form a global batch together with the first samples of the next epoch: each epoch holds each sample once."""
    drop = "drop"
    """They are left out. Which ones these are changes with every shuffle."""
    pad = "pad"
    """They are filled up with samples of the same epoch that weigh nothing: right for evaluation."""


class SampleOrder:
    """Tells the sample and the weight at each position of a run, without storing an order.

    A position counts samples from the start of the run over all ranks and epochs. Position p is in epoch p // E, where E
    is the number of samples N for `Tail.wrap`, and N rounded down or up to whole global batches for `drop` and `pad`.

    Args:
        num_samples: Number of samples of the dataset.
        seed: Seed of the shuffle.
        shuffle: Draw another permutation for each epoch, instead of reading in dataset order.
        tail: What happens at the end of an epoch.
        global_batch_size: Samples per step; `Tail.wrap` does not depend on it.
    """

    def __init__(self, *, num_samples: int, seed: int, shuffle: bool, tail: Tail, global_batch_size: int) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        num_full, rest = divmod(num_samples, global_batch_size)
        match tail:
            case Tail.wrap:
                self._epoch_length = num_samples
            case Tail.drop:
                self._epoch_length = num_full * global_batch_size
            case Tail.pad:
                self._epoch_length = (num_full + (rest > 0)) * global_batch_size

    @property
    def epoch_length(self) -> int:
        """Number of positions of an epoch, padding included."""
        return self._epoch_length

    @property
    def num_padding(self) -> int:
        """Number of positions at the end of each epoch that repeat samples with weight 0."""
        return max(0, self._epoch_length - self._num_samples)

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
        return _permutation(self._num_samples, self._seed, epoch)[offset] if self._shuffle else offset

    def weights(self, positions: Sequence[int]) -> list[float]:
        """Return 1 for each position that holds a sample, and 0 for padding."""
        return [float(position % self._epoch_length < self._num_samples) for position in positions]


@functools.lru_cache(maxsize=_NUM_CACHED_EPOCHS)
def _permutation(num_samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_samples, seed, epoch)
