"""A fit of which one rank fails in a given way at a given place."""

import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded
from tests.faults.failing_job import CULPRIT, FailingTask, fail


class FailingModule(Regression):
    """Fails in the third batch of training, in the save after it, or in the first batch of validation."""

    def __init__(self, kind: str, place: str, first_step_s: float) -> None:
        super().__init__()
        self._kind, self._place = kind, place
        self._first_step_s = first_step_s

    def _fail_in(self, place: str) -> None:
        if self._place == place:
            fail(self._kind)

    @override
    def setup(self, stage: str) -> None:
        self._fail_in("configure")

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._fail_in("load")

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 and self.global_rank == CULPRIT:
            time.sleep(self._first_step_s)
        if batch_idx == 2:
            self._fail_in("step")
        return super().training_step(batch, batch_idx)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_step == 3:
            self._fail_in("save")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._fail_in("validation")
        self.log("score", batch[0].mean(), sync_dist=True)


def fit(
    folder: str,
    kind: str,
    place: str,
    timeout_s: float,
    init_timeout_s: float | None = None,
    first_step_s: float = 0.0,
) -> None:
    """Fit, with a checkpoint after each step, and fail. The place "load" resumes from what such a fit has left.

    Prints errors itself, since the harness takes its hands off the output before Python does.
    """
    FailingTask.folder = Path(folder)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error-{os.environ['RANK']}.json"
    trainer = build_trainer(
        {"data_parallel_replicate": 2},
        strategy_options={"timeout_s": timeout_s, "init_timeout_s": init_timeout_s},
        callbacks=[ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=1, save_last=True)],
        enable_checkpointing=True,
        max_epochs=1 if place != "load" else 2,
    )
    try:
        loaders = [rank_loader(make_samples(16), 4, dist.get_rank(), 2) for _ in range(2)]
        module = seeded(lambda: FailingModule(kind, place, first_step_s))
        trainer.fit(module, *loaders, ckpt_path="last" if place == "load" else None)
    except BaseException:
        traceback.print_exc()
        raise
