"""Uses of the Trainer that are run under Lightning's own strategy and under ours."""

import functools

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader

from d9d_lightning import D9DStrategy
from tests.d9d_lightning.differential import Case, Probe


def options(**values):
    return lambda folder: dict(values)


class Scheduled(Probe):
    interval, frequency = "step", 1

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        config = {"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class EveryOther(Scheduled):
    frequency = 2


class PerEpoch(Scheduled):
    interval = "epoch"


class OnPlateau(Probe):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        # Nothing is ever good enough.
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class OwnSteps(Scheduled):
    """Overrides what Lightning lets one override of a step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        scheduler.step()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class ReturnsDict(Probe):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "batch": batch_idx}


class EndsEpochEarly(Probe):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 and self.current_epoch == 0 else None


class Logs(Probe):
    """Logs in all the ways that there are."""

    def __init__(self):
        super().__init__()
        metrics = [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
        self.collection = torchmetrics.MetricCollection(metrics, prefix="train_")
        self.both = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        prediction, y = self.errors(batch)
        loss = F.mse_loss(prediction, y)
        self.log("on_step", loss, on_step=True, on_epoch=False, sync_dist=True)
        self.log("sum", y.sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("max", y.max(), on_step=False, on_epoch=True, reduce_fx=torch.max, sync_dist=True)
        self.log("number", float(batch_idx), rank_zero_only=True)
        self.log("count", batch_idx + 1, on_epoch=True, prog_bar=True, logger=False)
        self.log_dict({"dict_a": loss, "dict_b": loss * 2}, on_step=True, on_epoch=True, sync_dist=True)
        self.collection(prediction.detach(), y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        self.both(prediction.detach(), y)
        self.log("both", self.both, on_step=False, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", loss, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("at_epoch_end", float(self.current_epoch))

    def on_validation_epoch_end(self):
        self.log("at_val_end", self.current_epoch + 1.0)

    def on_before_optimizer_step(self, optimizer):
        self.log("learning_rate", optimizer.param_groups[0]["lr"])


class TwoValidations(Probe):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        prediction, y = self.errors(batch)
        loss = F.mse_loss(prediction, y)
        self.log("val_loss", loss, sync_dist=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False, sync_dist=True)


HOOKS_THAT_LOG = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
]


def counting(name):
    def hook(self, *args, **kwargs):
        self.calls[name] = self.calls.get(name, 0) + 1
        self.log(name, float(self.calls[name]), prog_bar=True)

    return functools.wraps(getattr(L.LightningModule, name))(hook)


class LogsInHooks(Probe):
    """Logs in each hook that allows it how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = {}


for _name in HOOKS_THAT_LOG:
    setattr(LogsInHooks, _name, counting(_name))


class CallbackThatLogs(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("starts", float(batch_idx), prog_bar=True)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.log("steps", float(trainer.global_step))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("ends", float(batch_idx), on_step=True, on_epoch=True)
        self.log_dict({"outputs": float(len(outputs)), "batch": float(batch_idx)})

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        pl_module.log("val_ends", float(batch_idx))


class Unfreezes(Probe):
    def on_train_epoch_start(self):
        self.net.requires_grad_(self.current_epoch != 1)
        self.head.requires_grad_(self.current_epoch != 2)


class ShortSignatures(Probe):
    def training_step(self, batch):
        return super().training_step(batch, 0)

    def validation_step(self, batch):
        super().validation_step(batch, 0)

    def predict_step(self, batch):
        return super().predict_step(batch, 0)


class TwoBatches(Probe):
    def training_step(self, batch, batch_idx):
        x, y = (torch.cat(parts) for parts in zip(batch["left"], batch["right"], strict=True))
        return super().training_step((x, y), batch_idx)


def fit_on_two_loaders(trainer, module, data):
    train = CombinedLoader({"left": data["train_dataloaders"], "right": data["val_dataloaders"]}, "max_size_cycle")
    trainer.fit(module, train)


class StopIn(L.Callback):
    """Ends the fit from within a hook."""

    def __init__(self, name):
        self.__dict__[name] = lambda trainer, *args: setattr(trainer, "should_stop", True)


def stop_in(name):
    return lambda folder: {"min_epochs": 2, "max_epochs": 4, "num_sanity_val_steps": 1, "callbacks": [StopIn(name)]}


class StopAfter(L.Callback):
    def __init__(self, num_batches):
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.num_batches:
            trainer.should_stop = True


def checkpoints(**settings):
    def build(folder):
        checkpoint = ModelCheckpoint(folder, filename="{epoch}-{step}-{val_loss:.3f}", **settings)
        return {"max_epochs": 3, "callbacks": [checkpoint], "enable_checkpointing": True}

    return build


def fit_and_more(trainer, module, data):
    """Validate, fit, test, fit on, predict."""
    val = data["val_dataloaders"]
    results = [
        trainer.validate(module, val, verbose=False),
        trainer.fit(module, **data),
        trainer.test(module, val, verbose=False),
    ]
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, **data)
    return [*results, whole_predictions(trainer, trainer.predict(module, val))]


def fit_and_test_best(trainer, module, data):
    """The weights of the best checkpoint, which is not the last one."""
    trainer.fit(module, **data)
    result = trainer.test(module, data["val_dataloaders"], ckpt_path="best", weights_only=True, verbose=False)
    return [result, trainer.validate(module, data["val_dataloaders"], verbose=False)]


def whole_predictions(trainer, predictions):
    """Those of all samples; as ever, each data-parallel rank has its own."""
    if isinstance(trainer.strategy, D9DStrategy) and trainer.strategy.mesh.data_parallel > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, predictions)
        return [torch.cat(batch) for batch in zip(*parts, strict=True)]
    return predictions


def schedule_accumulation(folder):
    return {"max_epochs": 4, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})]}


def early_stopping(folder):
    # No step makes it better by so much.
    return {"max_epochs": 5, "callbacks": [EarlyStopping("val_loss", patience=1, min_delta=5.0)]}


CASES = {
    "plain": Case(options(max_epochs=2)),
    "accumulate_2": Case(options(max_epochs=2, accumulate_grad_batches=2), has_windows=True),
    "accumulate_3_short_window": Case(
        options(accumulate_grad_batches=3), num_train=5, has_equal_values=False, has_windows=True
    ),
    "accumulate_4_of_2": Case(
        options(accumulate_grad_batches=4, max_epochs=4),
        Scheduled,
        num_train=2,
        has_equal_values=False,
        has_windows=True,
    ),
    "accumulate_3_unsized": Case(
        options(accumulate_grad_batches=3), num_train=5, is_sized=False, has_equal_values=False, has_windows=True
    ),
    "accumulation_scheduler": Case(schedule_accumulation, has_windows=True),
    "limit_batches": Case(options(limit_train_batches=3, limit_val_batches=1)),
    "limit_fractions": Case(options(limit_train_batches=0.5, limit_val_batches=0.5)),
    "limit_val_0": Case(options(limit_val_batches=0)),
    "limit_train_0": Case(options(limit_train_batches=0)),
    "val_check_interval_int": Case(options(val_check_interval=2, max_epochs=2)),
    "val_check_interval_float": Case(options(val_check_interval=0.5, accumulate_grad_batches=2), has_windows=True),
    "val_check_within_window": Case(options(val_check_interval=1, accumulate_grad_batches=2), has_windows=True),
    "val_check_over_epochs": Case(options(val_check_interval=3, check_val_every_n_epoch=None, max_epochs=2)),
    "check_val_every_n_epoch": Case(options(check_val_every_n_epoch=2, max_epochs=3)),
    "fast_dev_run": Case(options(fast_dev_run=2)),
    "overfit_batches": Case(options(overfit_batches=2, max_epochs=2)),
    "max_steps": Case(options(max_steps=3, max_epochs=-1, accumulate_grad_batches=2), has_windows=True),
    "min_steps": Case(options(min_steps=6, max_epochs=1)),
    "stop_and_min_epochs": Case(lambda folder: {"min_epochs": 2, "max_epochs": 3, "callbacks": [StopAfter(2)]}),
    "stop_within_window": Case(
        lambda folder: {"max_epochs": 3, "accumulate_grad_batches": 2, "callbacks": [StopAfter(3)]},
        has_equal_values=False,
        has_windows=True,
        gives_window_up=True,
    ),
    "sanity_checking": Case(options(num_sanity_val_steps=2)),
    "detect_anomaly": Case(options(detect_anomaly=True)),
    "barebones": Case(options(barebones=True, max_epochs=2)),
    "profiler_simple": Case(lambda folder: {"profiler": SimpleProfiler(folder, "simple")}),
    "profiler_advanced": Case(lambda folder: {"profiler": AdvancedProfiler(folder, "advanced")}, num_train=1),
    "log_every_n_steps": Case(options(log_every_n_steps=3, max_epochs=2)),
    "epoch_ends_early": Case(options(max_epochs=2), EndsEpochEarly),
    "epoch_ends_within_window": Case(
        options(max_epochs=2, accumulate_grad_batches=2),
        EndsEpochEarly,
        has_windows=True,
        gives_window_up=True,
    ),
    "two_val_loaders": Case(options(max_epochs=2), TwoValidations, num_val_loaders=2),
    "unsized": Case(options(max_epochs=2), is_sized=False),
    "schedule_per_step": Case(options(max_epochs=2, accumulate_grad_batches=2), Scheduled, has_windows=True),
    "schedule_every_other": Case(
        lambda folder: {"max_epochs": 2, "callbacks": [LearningRateMonitor("step")]}, EveryOther
    ),
    "schedule_per_epoch": Case(lambda folder: {"max_epochs": 2, "callbacks": [LearningRateMonitor()]}, PerEpoch),
    "reduce_on_plateau": Case(options(max_epochs=3), OnPlateau),
    "clip_norm": Case(options(gradient_clip_val=0.05)),
    "clip_value": Case(options(gradient_clip_val=0.05, gradient_clip_algorithm="value")),
    "own_steps": Case(module=OwnSteps),
    "returns_dict": Case(module=ReturnsDict),
    "logs": Case(options(max_epochs=2, log_every_n_steps=2), Logs),
    "best_checkpoint": Case(checkpoints(monitor="val_loss", save_top_k=2, save_last=True)),
    "checkpoint_every_2_steps": Case(checkpoints(every_n_train_steps=2, save_top_k=-1)),
    "test_best": Case(checkpoints(monitor="loss_epoch", mode="max"), act=fit_and_test_best),
    "early_stopping": Case(early_stopping),
    "fit_and_more": Case(act=fit_and_more),
    "logs_in_hooks": Case(options(max_epochs=2), LogsInHooks),
    "callback_that_logs": Case(lambda folder: {"max_epochs": 2, "callbacks": [CallbackThatLogs()]}),
    "unfreezes": Case(options(max_epochs=4), Unfreezes),
    "short_signatures": Case(options(num_sanity_val_steps=1), ShortSignatures, act=fit_and_more),
    "two_train_loaders": Case(options(max_epochs=2), TwoBatches, act=fit_on_two_loaders),
    "val_check_by_time": Case(options(val_check_interval="00:00:00:00", max_epochs=2)),
    "max_time_is_over": Case(options(max_time={"seconds": 0}, max_epochs=3)),
    "max_steps_and_min_epochs": Case(options(max_steps=3, min_epochs=2, max_epochs=4)),
    "reloaded_loaders": Case(options(reload_dataloaders_every_n_epochs=2, max_epochs=5)),
    "log_never": Case(options(log_every_n_steps=0, max_epochs=2)),
    "stop_in_batch_start": Case(stop_in("on_train_batch_start")),
    "stop_in_validation_end": Case(stop_in("on_validation_end")),
    "stop_in_optimizer_step": Case(stop_in("on_before_optimizer_step")),
}

SAMPLE = {
    "plain",
    "accumulate_3_short_window",
    "accumulation_scheduler",
    "limit_batches",
    "val_check_interval_int",
    "fast_dev_run",
    "stop_within_window",
    "barebones",
    "two_val_loaders",
    "reduce_on_plateau",
    "clip_norm",
    "own_steps",
    "returns_dict",
    "logs",
    "best_checkpoint",
    "early_stopping",
    "fit_and_more",
}
