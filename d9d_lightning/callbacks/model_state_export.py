"""Exports of the weights for other tools while a module trains."""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from d9d.model_state.io.save import BackgroundExport
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.names import NearestNames, listed
from d9d_lightning.callbacks.weight_averaging import EMAWeightAveraging
from d9d_lightning.strategy import D9DStrategy

__all__ = ["ModelStateExport"]


class ModelStateExport(Callback):
    """Exports the weights as .safetensors files: at the end of fit, every so many steps, or when a metric is best.

    Needs a `D9DStrategy`, whose `export_model_state` it calls on all ranks; on one process too. With stages, shards or
    split layers each tensor is written once, whole.

    The export at the end is in ``dirpath`` itself, the best one in ``dirpath/best``, and those of steps in
    ``dirpath/step-<global step>``. An export takes the place of an older one when it is complete.

    Beside `EMAWeightAveraging` they have the averages that validation and checkpoints use, once there are some. Name that
    callback before this one, so that it has averaged a step that is exported.
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_steps: int | None = None,
        on_best: str | ModelCheckpoint | None = None,
        mode: Literal["min", "max"] = "min",
        *,
        at_end: bool | None = None,
        mapper: ModelStateMapper | None = None,
        shard_size_gb: float = 4.0,
        dtype: torch.dtype | None = None,
        manifest: bool = False,
        averages: bool = True,
        in_background: bool = False,
    ) -> None:
        """Say when to export, and where to.

        Args:
            dirpath: Folder of the exports, on a file system that all ranks share.
            every_n_steps: Optimizer steps between exports; None exports after no steps.
            on_best: Name of a logged metric, to export whenever it is better than ever after a validation or an epoch. Or
                a `ModelCheckpoint` of the Trainer, to export what it takes for its best, whenever that is another one.
            mode: Whether a smaller or a larger value of the metric is better. A `ModelCheckpoint` says so itself.
            at_end: Whether to export when `fit` ends. None: if nothing else is chosen.
            mapper: Makes the exported tensors. None: as the strategy says.
            shard_size_gb: Largest size of a file in GB.
            dtype: What floating point tensors are converted to; None keeps each tensor's own.
            manifest: Whether to write hashes of the files too.
            averages: Whether to export what `EMAWeightAveraging` averages. False: the weights themselves, also at the end.
            in_background: Whether to train on when the weights are copied to the host, while threads write the files. An
                export is complete when the next one begins, or `fit` ends; one that an exception meets is lost.

        Raises:
            ValueError: With all problems.
        """
        super().__init__()
        problems: list[str] = []
        # A bool counts as an int, and is a mistake here.
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
            problems.append(f"every_n_steps ({every_n_steps!r}) must be a whole number of at least 1, or None.")
        if isinstance(on_best, ModelCheckpoint) and (on_best.monitor is None or on_best.save_top_k == 0):
            problems.append("on_best is a ModelCheckpoint without monitor, or with save_top_k=0: it has no best.")
        if mode not in ("min", "max"):
            problems.append(f"mode ({mode!r}) must be 'min' or 'max'.")
        if problems:
            raise ValueError(f"ModelStateExport: {' '.join(problems)}")
        self._dirpath = Path(dirpath)
        self._every_n_steps = every_n_steps
        self._checkpoint = BestCheckpoint(on_best) if isinstance(on_best, ModelCheckpoint) else None
        self._monitor = on_best if isinstance(on_best, str) else None
        self._sign = 1 if mode == "min" else -1
        self._at_end = at_end if at_end is not None else every_n_steps is None and on_best is None
        self._mapper = mapper
        self._shard_size_gb, self._dtype, self._manifest = shard_size_gb, dtype, manifest
        self._averages, self._in_background = averages, in_background
        self._key = {
            "every_n_steps": every_n_steps,
            "on_best": on_best if isinstance(on_best, str) else on_best is not None,
            "mode": mode,
            "averages": averages,
        }
        self._pending: BackgroundExport | None = None
        self._best = math.inf
        self._last_step = 0
        self._has_validated = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _strategy_of(trainer)
        if self._checkpoint is not None and self._checkpoint.callback not in trainer.checkpoint_callbacks:
            raise ValueError(
                "ModelStateExport: on_best is a ModelCheckpoint that the Trainer does not have, so that it never has a best. "
                "Add it to the callbacks of the Trainer, or name its metric instead."
            )
        if any(isinstance(callback, WeightAveraging) for callback in _callbacks_of(trainer)):
            rank_zero_warn(
                "ModelStateExport: exports before the end of fit have the weights themselves, not the averages of Lightning's "
                "WeightAveraging. EMAWeightAveraging of d9d_lightning.callbacks has them exported."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._mapper is None:
            # Not at the end of the training.
            _strategy_of(trainer).check_export()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._checkpoint is not None:
            self._checkpoint.start()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export_best_checkpoint(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._export_best_checkpoint(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._every_n_steps is None or step == self._last_step or step % self._every_n_steps:
            return
        self._last_step = step
        self._export(trainer, self._dirpath / f"step-{step}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._has_validated = True
            self._export_if_best(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export_best_checkpoint(trainer)
        self._export_if_best(trainer)
        metrics: Mapping[str, torch.Tensor] = trainer.callback_metrics
        is_through = self._has_validated or not trainer.enable_validation
        if self._monitor is not None and self._monitor not in metrics and is_through:
            raise ValueError(
                f"ModelStateExport: on_best names a metric that nobody logs: {NearestNames(metrics).described([self._monitor])}. "
                f"Logged are {listed(metrics) or 'none'}."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export_best_checkpoint(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not on_train_end, where another callback may still change weights, as those that average them do.
        if self._at_end:
            self._export(trainer, self._dirpath)
        self._complete()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Other ranks may not come here, so there is nobody to complete it with.
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()

    @property
    @override
    def state_key(self) -> str:
        # Not by its folder, since a job may go on elsewhere.
        return f"{type(self).__qualname__}{self._key}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "last_step": self._last_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._last_step = state_dict["best"], state_dict["last_step"]

    def _export_best_checkpoint(self, trainer: Trainer) -> None:
        """Export if the best checkpoint is another one. Before anything trains on, as the weights must be those in it.

        Lightning calls a `ModelCheckpoint` after all other callbacks, so this is for the next hook of each.
        """
        if self._checkpoint is not None and self._checkpoint.is_new(trainer.strategy.broadcast):
            self._export(trainer, self._dirpath / "best")

    def _export_if_best(self, trainer: Trainer) -> None:
        if self._monitor is None:
            return
        metrics: Mapping[str, torch.Tensor] = trainer.callback_metrics
        value = self._sign * float(metrics[self._monitor]) if self._monitor in metrics else math.inf
        # A metric that is not synced differs between ranks, and a NaN is never better.
        if not trainer.strategy.reduce_boolean_decision(value < self._best):
            return
        self._best = value
        self._export(trainer, self._dirpath / "best")

    def _export(self, trainer: Trainer, path: Path) -> None:
        self._complete()
        with contextlib.ExitStack() as stack:
            for callback in _callbacks_of(trainer):
                if isinstance(callback, EMAWeightAveraging):
                    stack.enter_context(callback.showing(trainer, trainer.lightning_module, averages=self._averages))
            self._pending = _strategy_of(trainer).export_model_state(
                path,
                self._mapper,
                shard_size_gb=self._shard_size_gb,
                dtype=self._dtype,
                manifest=self._manifest,
                in_background=self._in_background,
            )

    def _complete(self) -> None:
        """Wait for an export in the background. All ranks must call it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


class BestCheckpoint:
    """Tells when the best of a `ModelCheckpoint` is another one."""

    def __init__(self, callback: ModelCheckpoint) -> None:
        """Take the callback, which belongs to a Trainer."""
        self.callback = callback
        self.start()

    def start(self) -> None:
        """Take what the callback has now for known, as after the state of an earlier run is restored."""
        self._last_score = self.callback.current_score
        self._best = self._best_now()

    def is_new(self, broadcast: Callable[[bool], bool]) -> bool:
        """Tell whether the best one has changed since the last call, as rank 0 says. All ranks must call it.

        Args:
            broadcast: Returns the value of rank 0. Called only where the callback has kept a checkpoint since.
        """
        # Each kept checkpoint has a score of its own, also if it is no other number; ranks keep them together.
        if self.callback.current_score is self._last_score:
            return False
        self._last_score = self.callback.current_score
        before, self._best = self._best, self._best_now()
        # Ranks may have other scores, of a metric that is not synced, and rank 0 writes the checkpoints.
        return broadcast(self._best != before)

    def _best_now(self) -> tuple[str, float | None]:
        # The path alone may be the same, if it is written over.
        score = self.callback.best_model_score
        return self.callback.best_model_path, None if score is None else float(score)


def _callbacks_of(trainer: Trainer) -> list[Callback]:
    # Lightning has no public type for the list
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def _strategy_of(trainer: Trainer) -> D9DStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, D9DStrategy):
        raise TypeError(
            f"ModelStateExport needs Trainer(strategy=D9DStrategy(...)), but the strategy is {type(strategy).__name__}."
        )
    return strategy
