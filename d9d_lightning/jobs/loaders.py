"""Check and seed the loaders of a run before Lightning reads them."""
# Lightning seeds workers by a function of its own
# pyright: reportPrivateUsage=false

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, sized_len
from lightning.pytorch import Trainer

from d9d.core.dist_context import DistributedContext
from d9d.core.dist_ops import all_gather_object

__all__ = ["prepare_loader"]


def prepare_loader(loader: object, trainer: Trainer, context: DistributedContext | None, data_rank: int) -> None:
    """Let workers draw the random numbers of their data-parallel rank, and refuse loaders that make others wait.

    All ranks must call it. Lightning refuses a loader without batches on the rank that has it, unless the module allows
    them. Then it skips the loop there, which the others may not do without: they sum gradients and metrics and gather
    shards together.

    Args:
        loader: What the user gives.
        trainer: Runs the loops.
        context: Ranks of the job; None on one process.
        data_rank: Data-parallel rank of this process: ranks that read the same samples must augment them alike.

    Raises:
        RuntimeError: On all ranks, if some have no batch and others have.
    """
    _auto_add_worker_init_fn(loader, data_rank)
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
