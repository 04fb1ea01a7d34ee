"""Lightning's counts of training batches."""
# Its counters have no public name
# pyright: reportPrivateUsage=false

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _ProcessedTracker

__all__ = ["convert_counters", "num_trained"]


def num_trained(trainer: Trainer) -> int:
    """Return how many batches this rank has trained on since the start of the run, resumed ones included."""
    return _counters(trainer)[0].processed


def convert_counters(trainer: Trainer, total: int, per_step: int, saved_per_step: int) -> None:
    """Count the batches of a resumed run as if all of its steps had had as many as they have now.

    Args:
        trainer: Has restored its counters, and not begun to train.
        total: Number of batches that were trained on, as they are counted now.
        per_step: Batches of a step now.
        saved_per_step: Batches of a step when the counters were saved.
    """
    in_run, in_epoch = _counters(trainer)
    steps, rest = divmod(in_epoch.processed, saved_per_step)
    _shift(in_run, total - in_run.processed)
    _shift(in_epoch, steps * per_step + rest - in_epoch.processed)


def _counters(trainer: Trainer) -> tuple[_ProcessedTracker, _ProcessedTracker]:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    in_run, in_epoch = progress.total, progress.current
    if not isinstance(in_run, _ProcessedTracker) or not isinstance(in_epoch, _ProcessedTracker):
        raise TypeError(f"Lightning counts training batches by {type(in_run).__name__}, not by _ProcessedTracker.")
    return in_run, in_epoch


def _shift(counter: _ProcessedTracker, difference: int) -> None:
    """Shift a counter as a whole: from the differences in it Lightning tells where in a batch it has stopped."""
    counter.ready += difference
    counter.started += difference
    counter.processed += difference
    counter.completed += difference
