"""A fit of which one rank fails in a given way at a given place."""

import os
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded
from tests.faults.failing_job import FailingTask, fail


class FailingModule(Regression):
    """Fails in the third batch of training, or in the first of validation."""

    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        self._kind, self._place = kind, place

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self._place == "step" and batch_idx == 2:
            fail(self._kind)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self._place == "validation":
            fail(self._kind)
        self.log("score", batch[0].mean(), sync_dist=True)


def fit(folder: str, kind: str, place: str, timeout_s: float) -> None:
    """Fit, and fail. Prints errors itself, since the harness takes its hands off the output before Python does."""
    FailingTask.folder = Path(folder)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error-{os.environ['RANK']}.json"
    trainer = build_trainer({"data_parallel_replicate": 2}, strategy_options={"timeout_s": timeout_s})
    try:
        loaders = [rank_loader(make_samples(16), 4, dist.get_rank(), 2) for _ in range(2)]
        trainer.fit(seeded(lambda: FailingModule(kind, place)), *loaders)
    except BaseException:
        traceback.print_exc()
        raise
