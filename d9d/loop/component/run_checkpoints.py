"""The checkpoints of a run, as all of its ranks see them."""

from pathlib import Path

import torch.distributed as dist

from d9d.checkpoint import CheckpointFolder, OnCorrupt, SavedCheckpoint, find_checkpoint
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d.loop.component.restarts import count_restart, forget_restarts
from d9d.loop.config import CheckpointingConfig, StepActionSpecial

__all__ = ["STATE_KEY", "RunCheckpoints"]

STATE_KEY = "state"
"""Key of the state of the job in a checkpoint."""


class RunCheckpoints:
    """The folder of the checkpoints of a run, and the ranks that save to it and load from it. All ranks must build it.

    Args:
        dist_context: Topology of the job.
        config: Where checkpoints are, and what to do about damaged ones.
        run_name: Name of the run, whose checkpoints are in a folder of that name; None for a job without one.
    """

    def __init__(self, dist_context: DistributedContext, config: CheckpointingConfig, run_name: str | None) -> None:
        self.save_dir: Path = config.save_dir if run_name is None else config.save_dir / run_name
        """Folder of the checkpoints."""
        self.folder = CheckpointFolder(self.save_dir, dist_context.logger, share_with_group=config.share_with_group)
        self.group: dist.ProcessGroup | None = dist_context.separate_host_group("checkpoints", config.timeout)
        """All ranks, with the time limit of checkpoints; None for a job of one."""
        self.participants = Participants([] if self.group is None else [self.group])
        self._logger = dist_context.logger
        self._on_corrupt: OnCorrupt = config.on_corrupt
        self._saves = config.period_steps != StepActionSpecial.disable
        self._max_restarts_without_progress = config.max_restarts_without_progress
        self._verified: SavedCheckpoint | None = None
        self._last_seen_step: int | None = None  # of the main rank; None if it has not looked

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest complete checkpoint, after its files were verified once. All ranks must call it; blocks.

        Raises:
            ValueError: If it is damaged, see ``checkpointing.on_corrupt``.
        """
        with self.participants.failing_together():
            if self.participants.rank == 0:
                self.folder.recover()
                self._last_seen_step = self._last_complete_step()
        self._verified = find_checkpoint(
            self.folder, self.participants, self._on_corrupt, self._logger, verified=self._verified
        )
        return self._verified

    def refuse_newer(self, own_step: int) -> None:
        """Refuse to save to the folder if another job has saved there since `newest` looked. Call it with the lock; not collective.

        Damaged ones that were passed over were there before.

        Args:
            own_step: Step of the newest checkpoint that this job has saved or loaded; 0 for none.

        Raises:
            RuntimeError: If there is a newer one.
        """
        last_step = self._last_complete_step()
        if self._last_seen_step is not None and last_step > max(self._last_seen_step, own_step):
            raise RuntimeError(
                f"another job has saved {self.folder.final_path(last_step)} since this one resumed from step {own_step}. "
                f"Start this one again to go on from there, or give it another name (run.name)."
            )

    def _last_complete_step(self) -> int:
        return max((saved.step for saved in self.folder.complete()), default=0)

    def count_restart(self) -> None:
        """Refuse to start a job that was restarted too often without progress. All ranks must call it; blocks.

        Raises:
            RuntimeError: It was; see ``checkpointing.max_restarts_without_progress``.
        """
        if not self._saves:
            return  # nothing tells how far the job has come
        newest = self.newest()
        count_restart(
            self.participants,
            self.save_dir,
            None if newest is None else newest.step,
            self._max_restarts_without_progress,
            "checkpointing.max_restarts_without_progress",
            self._logger,
        )

    def forget_restarts(self) -> None:
        """End the count of a job that is through, see `forget_restarts`. No communication."""
        if self._saves:
            forget_restarts(self.participants, self.save_dir)
