"""Fits that torchrun starts again: counted, and stopped where they get no further."""
# Lightning keeps the checkpoint that it has loaded to itself
# pyright: reportPrivateUsage=false

import logging
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from d9d.core.dist_context import DistributedContext
from d9d.core.launch import RestartEnvironment
from d9d.core.participants import Participants
from d9d.loop.component.restarts import count_restart, forget_restarts
from d9d_lightning.checkpoints.trainer_checks import local_path

__all__ = ["count_fit", "end_count"]

_log = logging.getLogger(__name__)


def count_fit(trainer: Trainer, context: DistributedContext | None, limit: int) -> None:
    """Refuse to fit if torchrun has restarted the job too often without progress. All ranks must call it; blocks.

    Progress is a checkpoint that is newer than the one that the attempt before has resumed from. It is counted in the folder
    of the first `ModelCheckpoint`; without one nothing tells how far a job has come.

    Args:
        trainer: Is about to fit, and has loaded a checkpoint if it resumes.
        context: Ranks of the job; None on one process.
        limit: Restarts in a row without progress that are allowed.

    Raises:
        RuntimeError: It was restarted more often.
    """
    folder, participants = _folder(trainer), _all_ranks(context)
    if folder is None:
        return
    step: int | None = trainer._checkpoint_connector._loaded_checkpoint.get("global_step")
    with participants.failing_together():
        if participants.rank == 0 and step is None and RestartEnvironment.read().attempt > 0:
            _log.warning(
                "torchrun has restarted the job, and fit() begins at the first step. To resume, call fit(ckpt_path='last'), with "
                "ModelCheckpoint(dirpath=..., save_last=True): a folder that each start finds again."
            )
    name = "D9DStrategy(max_restarts_without_progress=...)"
    count_restart(participants, folder, step, limit, name, _log)


def end_count(trainer: Trainer, context: DistributedContext | None) -> None:
    """Forget the restarts of a fit that is through, which a script may repeat before another one. No communication.

    Args:
        trainer: Has run, and may have been interrupted.
        context: Ranks of the job; None on one process.
    """
    folder = _folder(trainer)
    is_through = trainer.state.fn == TrainerFn.FITTING and trainer.state.status != TrainerStatus.INTERRUPTED
    if is_through and folder is not None:
        forget_restarts(_all_ranks(context), folder)


def _folder(trainer: Trainer) -> Path | None:
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # Without files there are no callbacks either, as in fast_dev_run.
    return local_path(Path(folders[0])) if folders and folders[0] is not None else None


def _all_ranks(context: DistributedContext | None) -> Participants:
    return Participants([] if context is None else context.groups[:1])
