"""Evaluations in which data-parallel ranks have different numbers of batches: who else works on a batch.

[Note: values of uneven batches]
While some ranks are through with an evaluation, others may have a batch left. A value that is logged with ``on_step`` and
``sync_dist`` is then the mean over the ranks that have such a batch: they alone exchange it, rank to rank. All ranks know
the numbers of batches beforehand, so nobody waits for a rank that does not come. What has no meaning for some of the ranks
is refused on all of them, in the first batch: they all come to that.
"""
# Lightning's loops keep their counts to themselves
# pyright: reportPrivateUsage=false

from collections.abc import Sequence

import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop

from d9d.core.dist_ops import all_gather_object

__all__ = ["UnevenBatches"]


class UnevenBatches:
    """Tells, within an evaluation, which ranks work on a batch like the one of this rank."""

    def __init__(self, trainer: Trainer, group: dist.ProcessGroup) -> None:
        """Exchange the numbers of batches. All ranks of the group must call it; blocks the host.

        Args:
            trainer: Is about to evaluate.
            group: Data-parallel ranks.
        """
        self._trainer = trainer
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        known = all_gather_object((_num_batches(trainer), _is_number_known(trainer)), group)
        self._counts: Sequence[list[int | float]] = [counts for counts, _ in known]
        self.may_lack_ranks = not all(is_known for _, is_known in known)
        """Whether some rank may have no batch of a loader, which nobody knows beforehand."""

    @property
    def are_uneven(self) -> bool:
        """Tell whether ranks have different numbers of batches."""
        return any(counts != self._counts[0] for counts in self._counts)

    def peers(self) -> list[int] | None:
        """Return the global ranks that have the batch that is evaluated now, or None if all have it, or there is none."""
        batch = self._current_batch() if self.are_uneven else None
        if batch is None:
            return None
        loader, index = batch
        having = [rank for rank, counts in zip(self._ranks, self._counts, strict=True) if index < counts[loader]]
        return having if len(having) < len(self._ranks) else None

    def refuse(self, what: str) -> None:
        """Refuse what all ranks must do together in each batch. They all come here in the first batch.

        Raises:
            RuntimeError: Ranks have different numbers of batches, and are in one of them.
        """
        if self.are_uneven and self._current_batch() is not None:
            raise RuntimeError(
                f"{what} in a step needs all data-parallel ranks, but they have different numbers of batches to evaluate "
                f"({', '.join(map(str, self._counts))}; a list has one for each loader). Use batches of two samples or more "
                "in a DataLoader, so that all ranks have as many, or gather when the epoch ends."
            )

    def _current_batch(self) -> tuple[int, int] | None:
        """Return loader and number of the batch that is evaluated now; None between batches."""
        loop = self._trainer._active_loop
        if loop is None or isinstance(loop, _FitLoop):
            return None
        progress = loop.batch_progress.current
        if progress.ready == progress.completed:
            return None
        # Lightning counts over all loaders, one after the other.
        index = progress.ready - 1
        for loader, count in enumerate(self._counts[self._rank]):
            if index < count:
                return loader, index
            index -= int(count)
        return None


def _num_batches(trainer: Trainer) -> list[int | float]:
    if trainer.predicting:
        return trainer.num_predict_batches
    if trainer.testing:
        return trainer.num_test_batches
    return trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches


def _is_number_known(trainer: Trainer) -> bool:
    loop = trainer._active_loop
    loaders = None if loop is None else loop._combined_loader
    # How many batches an IterableDataset gives depends on its workers, whatever length it has; a limit may not be reached.
    return loaders is not None and all(
        sized_len(loader) is not None and not has_iterable_dataset(loader) for loader in loaders.flattened
    )
