"""Which samples each step trains on, and which of them one rank reads."""

import dataclasses
from typing import Any

import torch

from d9d.dataset.sharded import ShardIndexingMode, derive_seed, shard_index

__all__ = ["EpochOrder", "GlobalBatchPlan"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatchPlan:
    """Places the samples of an epoch into steps, microbatches and ranks.

    [Note: global batches do not depend on the number of ranks]
    In sequential mode, step s holds positions s*G to (s+1)*G of the epoch, G being the global batch size, and its
    microbatch k the k-th run of `microbatch_size` of them. Rank r of D reads the microbatches with k % D == r. So the
    samples of a step, and of each microbatch, are the same for every D, and a run can go on with another D.
    In chunked mode a rank reads one block of neighbours per epoch, so steps do depend on D.

    The last step of an epoch that is not full is left out (`drop_last`), or filled up to a multiple of D with samples from
    the start of the epoch and dealt out in equal blocks.

    Attributes:
        num_samples: Number of samples of an epoch.
        global_batch_size: Samples per step over all ranks; a multiple of `dp_size * microbatch_size`.
        microbatch_size: Samples per microbatch.
        dp_size: Number of ranks that read different samples.
        dp_rank: Index of this rank among them.
        mode: How samples are dealt out to ranks.
        drop_last: Leave out the rest of an epoch that does not fill a step.
    """

    num_samples: int
    global_batch_size: int
    microbatch_size: int
    dp_size: int
    dp_rank: int
    mode: ShardIndexingMode
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch."""
        num_full, rest = divmod(self.num_samples, self.global_batch_size)
        return num_full if self.drop_last or rest == 0 else num_full + 1

    def microbatches(self, step: int) -> list[list[int]]:
        """Return the positions in the epoch that this rank reads in a step, one list per microbatch.

        Args:
            step: Zero-based step of the epoch.
        """
        if self.mode is ShardIndexingMode.chunked:
            return self._chunked_step(step)
        is_full = (step + 1) * self.global_batch_size <= self.num_samples
        return self._full_step(step) if is_full else self._last_step(step)

    def num_microbatches(self, step: int) -> int:
        """Return the number of microbatches of each rank in a step.

        Args:
            step: Zero-based step of the epoch.
        """
        return -(-self._samples_per_rank(step) // self.microbatch_size)

    def _samples_per_rank(self, step: int) -> int:
        rest = self.num_samples - step * self.global_batch_size
        return min(self.global_batch_size // self.dp_size, -(-rest // self.dp_size))

    def _full_step(self, step: int) -> list[list[int]]:
        start = step * self.global_batch_size
        num_microbatches = self.global_batch_size // self.microbatch_size
        return [
            list(range(start + k * self.microbatch_size, start + (k + 1) * self.microbatch_size))
            for k in range(self.dp_rank, num_microbatches, self.dp_size)
        ]

    def _last_step(self, step: int) -> list[list[int]]:
        per_rank = self._samples_per_rank(step)
        first = step * self.global_batch_size + self.dp_rank * per_rank
        return self._cut([position % self.num_samples for position in range(first, first + per_rank)])

    def _chunked_step(self, step: int) -> list[list[int]]:
        first = step * (self.global_batch_size // self.dp_size)
        local = range(first, first + self._samples_per_rank(step))
        return self._cut([shard_index(i, self.num_samples, self.dp_size, self.dp_rank, self.mode) for i in local])

    def _cut(self, positions: list[int]) -> list[list[int]]:
        return [positions[at : at + self.microbatch_size] for at in range(0, len(positions), self.microbatch_size)]

    def identity(self) -> dict[str, Any]:
        """Return the values that a saved position depends on: another value would turn it into other samples."""
        values: dict[str, Any] = {
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "drop_last": self.drop_last,
            "shard_indexing_mode": self.mode.value,
        }
        if self.mode is ShardIndexingMode.chunked:
            values["dp_size"] = self.dp_size
        return values


class EpochOrder:
    """Turns positions in an epoch into sample indices; the same on every rank, without communication.

    Args:
        num_samples: Number of samples of an epoch.
        shuffle: Draw another permutation for each epoch, instead of reading in dataset order.
        seed: Seed of the permutations.
    """

    def __init__(self, num_samples: int, shuffle: bool, seed: int) -> None:
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed
        self._cached_epoch = -1
        self._permutation = memoryview(b"")

    def samples(self, epoch: int, positions: list[int]) -> list[int]:
        """Return the sample at each position of an epoch."""
        if not self._shuffle:
            return positions
        if epoch != self._cached_epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
            # As a view of plain memory, a few elements are read faster than by indexing a tensor.
            self._permutation = torch.randperm(self._num_samples, generator=generator).numpy().data
            self._cached_epoch = epoch
        return [self._permutation[position] for position in positions]
