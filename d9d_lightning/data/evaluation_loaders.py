"""Loaders of evaluations in which each sample counts once: samplers that do not pad, and equally many batches.

[Note: equally many batches]
Lightning's sampler for validation and test repeats samples until all ranks have as many. Without that, some ranks have a
sample more than others, and where this one would be a batch of its own, the others have a batch less. A rank that is
through cannot take part in what the others do together in their last batch: gather the shards of FSDP, or reduce a value
that is logged on each step. So the others cut their last batch in two, and no sample is repeated: with 9 samples, 2 ranks
and batches of 4, one rank reads 4 and 1, the other 3 and 1. That is not possible with batches of one sample, and loaders
of other kinds have the batches that they have; for these see `TrainerRun` and `UnevenBatches`.
"""
# Lightning rebuilds loaders with functions of its own
# pyright: reportPrivateUsage=false

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper, _DatasetSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from typing_extensions import override

__all__ = ["SplitLastBatch", "count_samples_once"]


class SplitLastBatch(BatchSampler):
    """Makes one batch more of the samples of a rank than their number needs, by cutting the last one in two.

    Args:
        sampler: Samples of this rank; their number is a multiple of the batch size.
        batch_size: Samples per batch, at least 2.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    @override
    def __len__(self) -> int:
        return super().__len__() + 1

    @override
    def __iter__(self) -> Iterator[list[int]]:
        num_whole = super().__len__() - 1
        for index, batch in enumerate(super().__iter__()):
            if index < num_whole:
                yield batch
            else:
                yield batch[:-1]
                yield batch[-1:]


def count_samples_once(loader: object, stage: RunningStage) -> object:
    """Return the loader with a sampler that repeats no sample, where it has one that does.

    That is torch's `DistributedSampler`, which Lightning inserts, around another sampler too. Every other loader is
    returned as it is. No communication.

    Args:
        loader: As Lightning hands it to the strategy.
        stage: Validation or test.

    Raises:
        ValueError: On all ranks, if there are fewer samples than ranks.
    """
    if not isinstance(loader, DataLoader):
        return loader
    batches = loader.batch_sampler
    # A loader with a batch sampler of its own has another sampler only for show.
    padding = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    if not isinstance(padding, DistributedSampler) or type(padding) not in (
        DistributedSampler,
        DistributedSamplerWrapper,
    ):
        return loader
    num_samples, num_ranks = len(padding.dataset), padding.num_replicas  # pyright: ignore[reportArgumentType]
    if padding.drop_last or num_samples % num_ranks == 0:
        return loader
    drops_last = isinstance(batches, BatchSampler) and batches.drop_last
    if num_samples < num_ranks and not drops_last:
        raise ValueError(
            f"{num_samples} samples to evaluate are too few for {num_ranks} data-parallel ranks: no sample is counted twice, "
            f"so some ranks would have none. Use {num_samples} data-parallel ranks at most, or more samples."
        )
    sampler = _without_repeats(padding, drops_last=drops_last)
    arguments, options = _get_dataloader_init_args_and_kwargs(loader, sampler, stage)
    if type(batches) is BatchSampler and not drops_last and batches.batch_size > 1:
        most = -(-num_samples // num_ranks)
        if len(sampler) < most and most % batches.batch_size == 1:
            options |= {
                "batch_sampler": SplitLastBatch(sampler, batches.batch_size),
                "sampler": None,
                "shuffle": False,
                "batch_size": 1,
                "drop_last": False,
            }
    return _reinstantiate_wrapped_cls(loader, *arguments, **options)


def _without_repeats(padding: DistributedSampler[Any], *, drops_last: bool) -> DistributedSampler[Any]:
    """Return a sampler of the same samples, but for the repeated ones.

    Args:
        padding: Repeats samples.
        drops_last: Whether short batches are left out, so that all ranks must have equally many samples.
    """
    options: dict[str, Any] = {
        "num_replicas": padding.num_replicas,
        "rank": padding.rank,
        "shuffle": padding.shuffle,
        "seed": padding.seed,
    }
    inner = padding.dataset._sampler if isinstance(padding.dataset, _DatasetSamplerWrapper) else None
    if drops_last:
        options["drop_last"] = True
        return (
            DistributedSampler(padding.dataset, **options)
            if inner is None
            else DistributedSamplerWrapper(inner, **options)
        )
    if inner is None:
        return UnrepeatedDistributedSampler(padding.dataset, **options)
    return UnrepeatedDistributedSamplerWrapper(inner, **options)
