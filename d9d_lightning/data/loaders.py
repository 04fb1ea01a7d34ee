"""Check, seed and complete the loaders of a run before Lightning reads them."""
# Lightning seeds workers by a function of its own
# pyright: reportPrivateUsage=false

import math

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader, DistributedSampler

from d9d.core.agreement import agree_on
from d9d.core.dist_context import DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.core.participants import Participants
from d9d.dataset.lanes.loader_processes import OwnProcessGroup
from d9d_lightning.data.elastic_loader import ElasticLoader
from d9d_lightning.data.evaluation_loaders import count_samples_once
from d9d_lightning.data.loader_states import RankStateLoader, StatefulLoader

__all__ = ["agree_on_batches", "prepare_loader"]

_WHAT = "the training data (here a rank is a data-parallel one)"


def prepare_loader(
    loader: object, trainer: Trainer, context: DistributedContext | None, *, num_ranks: int, rank: int
) -> object:
    """Return the loader that Lightning shall read. All ranks must call it.

    Workers draw the random numbers of their data-parallel rank and outlive signals to its process group, evaluations count each sample once, and positions are
    those of this rank. Loaders that make others wait are refused. Lightning refuses a loader without batches on the rank
    that has it, unless the module allows them. Then it skips the loop there, which the others may not do without: they sum
    gradients and metrics and gather shards together.

    Args:
        loader: What the user gives, with Lightning's sampler.
        trainer: Runs the loops.
        context: Ranks of the job; None on one process.
        num_ranks: Number of data-parallel ranks.
        rank: Data-parallel rank of this process: ranks that read the same samples must augment them alike.

    Raises:
        RuntimeError: On all ranks, if some have no batch and others have.
        ValueError: On all ranks, for an elastic loader that does not fit, or samples that are too few to evaluate, or if ranks
            share out other samples than the others do.
    """
    stage = trainer.state.stage
    if isinstance(loader, ElasticLoader):
        if not trainer.training:
            raise ValueError("an elastic loader is for training: evaluate with an ordinary DataLoader.")
        loader.join(trainer, num_ranks, rank)
        return loader
    if stage is not None and stage.evaluating and trainer._accelerator_connector.use_distributed_sampler:
        loader = count_samples_once(loader, stage)
    _set_up_workers(loader, rank)
    _refuse_missing_batches(loader, trainer, context)
    _agree_on_training_data(loader, trainer, context)
    if trainer.training and isinstance(loader, StatefulLoader):
        own = loader.loader if isinstance(loader, RankStateLoader) else loader
        return RankStateLoader(own, trainer, num_ranks, rank)
    return loader


def _set_up_workers(loader: object, rank: int) -> None:
    if isinstance(loader, DataLoader) and isinstance(loader.worker_init_fn, OwnProcessGroup):
        # From an earlier run. Lightning seeds only where the user has given no function.
        loader.worker_init_fn = loader.worker_init_fn.then
    _auto_add_worker_init_fn(loader, rank)
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        loader.worker_init_fn = OwnProcessGroup(loader.worker_init_fn)


def _refuse_missing_batches(loader: object, trainer: Trainer, context: DistributedContext | None) -> None:
    group = None if context is None else context.replica_group
    if context is None or group is None or (trainer.predicting and not context.mesh_params.has_data_parallel_shard):
        return
    lengths = all_gather_object(sized_len(loader), group)
    without = [rank for rank, length in enumerate(lengths) if length == 0]
    if 0 < len(without) < len(lengths):
        raise RuntimeError(
            f"the {type(loader).__name__} has no batch on {len(without)} of {len(lengths)} data-parallel ranks: the others "
            f"would wait for them. Give each rank a sample at least, or use fewer ranks."
        )


def _agree_on_training_data(loader: object, trainer: Trainer, context: DistributedContext | None) -> None:
    group = None if context is None else context.replica_group
    if group is None or not trainer.training:
        return
    facts: dict[str, object] = {}
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if isinstance(sampler, DistributedSampler):
        facts["samples of the dataset"] = sized_len(sampler.dataset)
        facts["seed of the shuffle"] = sampler.seed if sampler.shuffle else None
    mend = "Give all ranks the same dataset and one seed (seed_everything() with the same number)."
    agree_on(Participants([group]), _WHAT, facts, mend)


def agree_on_batches(trainer: Trainer, context: DistributedContext | None) -> None:
    """Refuse to train where some ranks would be through with an epoch, and others wait for them. All ranks must call it; blocks.

    Args:
        trainer: Has read the loaders of its first epoch.
        context: Ranks of the job; None on one process.

    Raises:
        ValueError: On all ranks, if they train on different numbers of batches.
    """
    group = None if context is None else context.replica_group
    if group is None:
        return
    participants, own = Participants([group]), _num_batches_to_agree(trainer)
    # Who waits for whom is not known as long as some do not say how much they have.
    if None in participants.gather(own):
        return
    mend = "Give all ranks equally many batches, or set limit_train_batches to the lowest number."
    agree_on(participants, _WHAT, {"number of batches": own}, mend)


def _num_batches_to_agree(trainer: Trainer) -> int | None:
    """Return how many batches of its first epoch a rank reads; None if it does not tell, or something else may end all ranks together."""
    num_batches, callbacks = (
        trainer.fit_loop.max_batches,
        vars(trainer)["callbacks"],
    )  # Lightning does not declare these
    ends_by_time = any(isinstance(callback, Timer) for callback in callbacks)  # so does `max_time`
    if math.isinf(num_batches) or ends_by_time:
        return None
    if trainer.max_steps < 0:
        return int(num_batches)
    # By hand any number of steps may be done with a batch.
    is_automatic = trainer.lightning_module.automatic_optimization
    return min(int(num_batches), trainer.max_steps * trainer.accumulate_grad_batches) if is_automatic else None
