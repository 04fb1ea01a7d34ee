"""What the Trainer can do is the same under D9DStrategy as under Lightning's own strategy: hooks, counters, values."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint

from tests.d9d_lightning.differential import (
    LOG_TOLERANCE,
    WEIGHT_TOLERANCE,
    WORLD_1,
    WORLD_2,
    Case,
    Probe,
    pipeline_events,
    run_ours,
    run_plain,
    split_events,
)


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
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val / 2, gradient_clip_algorithm="norm")


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
        x, y = batch
        prediction, _ = self.errors(batch)
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
    results = [trainer.validate(module, val), trainer.fit(module, **data), trainer.test(module, val)]
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, **data)
    return [*results, trainer.predict(module, val)]


def schedule_accumulation(folder):
    return {"max_epochs": 4, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})]}


def early_stopping(folder):
    # No step makes it better by so much.
    return {"max_epochs": 5, "callbacks": [EarlyStopping("val_loss", patience=1, min_delta=5.0)]}


CASES = {
    "plain": Case(options(max_epochs=2)),
    "accumulate_2": Case(options(max_epochs=2, accumulate_grad_batches=2)),
    "accumulate_3_short_window": Case(options(accumulate_grad_batches=3), num_train=5, has_equal_values=False),
    # A3: an epoch is shorter than a window.
    "accumulate_4_of_2": Case(
        options(accumulate_grad_batches=4, max_epochs=4), Scheduled, num_train=2, has_equal_values=False
    ),
    "accumulate_3_unsized": Case(
        options(accumulate_grad_batches=3), num_train=5, is_sized=False, has_equal_values=False
    ),
    "accumulation_scheduler": Case(schedule_accumulation),
    "limit_batches": Case(options(limit_train_batches=3, limit_val_batches=1)),
    "limit_fractions": Case(options(limit_train_batches=0.5, limit_val_batches=0.5)),
    "limit_val_0": Case(options(limit_val_batches=0)),
    "limit_train_0": Case(options(limit_train_batches=0)),
    "val_check_interval_int": Case(options(val_check_interval=2, max_epochs=2)),
    "val_check_interval_float": Case(options(val_check_interval=0.5, accumulate_grad_batches=2)),
    "val_check_within_window": Case(options(val_check_interval=1, accumulate_grad_batches=2)),
    "val_check_over_epochs": Case(options(val_check_interval=3, check_val_every_n_epoch=None, max_epochs=2)),
    "check_val_every_n_epoch": Case(options(check_val_every_n_epoch=2, max_epochs=3)),
    "fast_dev_run": Case(options(fast_dev_run=2)),
    "overfit_batches": Case(options(overfit_batches=2, max_epochs=2)),
    "max_steps": Case(options(max_steps=3, max_epochs=-1, accumulate_grad_batches=2)),
    "min_steps": Case(options(min_steps=6, max_epochs=1)),
    "stop_and_min_epochs": Case(lambda folder: {"min_epochs": 2, "max_epochs": 3, "callbacks": [StopAfter(2)]}),
    "stop_within_window": Case(
        lambda folder: {"max_epochs": 3, "accumulate_grad_batches": 2, "callbacks": [StopAfter(3)]},
        has_equal_values=False,
    ),
    "sanity_checking": Case(options(num_sanity_val_steps=2)),
    "detect_anomaly": Case(options(detect_anomaly=True)),
    "barebones": Case(options(barebones=True, max_epochs=2)),
    "profiler_simple": Case(options(profiler="simple", limit_train_batches=1)),
    "profiler_advanced": Case(options(profiler="advanced", limit_train_batches=1)),
    "log_every_n_steps": Case(options(log_every_n_steps=3, max_epochs=2)),
    "epoch_ends_early": Case(options(max_epochs=2), EndsEpochEarly),
    "epoch_ends_within_window": Case(options(max_epochs=2, accumulate_grad_batches=2), EndsEpochEarly),
    "two_val_loaders": Case(options(max_epochs=2), TwoValidations, num_val_loaders=2),
    "unsized": Case(options(max_epochs=2), is_sized=False),
    "schedule_per_step": Case(options(max_epochs=2, accumulate_grad_batches=2), Scheduled),
    "schedule_every_other": Case(
        lambda folder: {"max_epochs": 2, "callbacks": [LearningRateMonitor("step")]}, EveryOther
    ),
    "schedule_per_epoch": Case(lambda folder: {"max_epochs": 2, "callbacks": [LearningRateMonitor()]}, PerEpoch),
    "reduce_on_plateau": Case(options(max_epochs=3), OnPlateau),
    "clip_norm": Case(options(gradient_clip_val=0.05)),
    "clip_value": Case(options(gradient_clip_val=0.05, gradient_clip_algorithm="value")),
    "own_steps": Case(options(gradient_clip_val=0.1), OwnSteps),
    "returns_dict": Case(module=ReturnsDict),
    "logs": Case(options(max_epochs=2, log_every_n_steps=2), Logs),
    "best_checkpoint": Case(checkpoints(monitor="val_loss", save_top_k=2, save_last=True)),
    "checkpoint_every_2_steps": Case(checkpoints(every_n_train_steps=2, save_top_k=-1)),
    "early_stopping": Case(early_stopping),
    "fit_and_more": Case(act=fit_and_more),
}


def check_shown(ours, plain, expected_events, name):
    assert ours.events == expected_events
    assert ours.trainer.global_step == plain.trainer.global_step
    assert ours.trainer.current_epoch == plain.trainer.current_epoch
    assert ours.trainer.fit_loop.state_dict() == plain.trainer.fit_loop.state_dict()
    rates = [[group["lr"] for run in (each,) for group in run.trainer.optimizers[0].param_groups] for each in (ours, plain)]
    assert rates[0] == rates[1]
    kept = [[step for step, _ in run.rows] for run in (ours, plain)]
    assert kept[0] == kept[1]
    assert [sorted(row) for _, row in ours.rows] == [sorted(row) for _, row in plain.rows]
    assert [sorted(row) for _, row in ours.values] == [sorted(row) for _, row in plain.values]


def check_values(ours, plain):
    for own_rows, rows in ((ours.rows, plain.rows), (ours.values, plain.values)):
        for (_, own), (_, expected) in zip(own_rows, rows, strict=True):
            assert own == pytest.approx(expected, rel=2e-6, abs=2e-6)
    weights = plain.weights
    own = {name: tensor for name, tensor in ours.weights.items() if "error" not in name}
    torch.testing.assert_close(own, {name: weights[name] for name in own}, **WEIGHT_TOLERANCE)
    torch.testing.assert_close(ours.result, plain.result, **LOG_TOLERANCE)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


def check_case(case, variants, folder, rank=0):
    plain_folder = folder / f"plain{rank}"
    plain = run_plain(case, plain_folder)
    for variant_name, variant in variants.items():
        ours = run_ours(case, variant, folder / variant_name)
        events, own_events = plain.events, ours.events
        if variant.has_pipeline:
            events = pipeline_events(events)
            ours.events = [event for event in own_events if event in set(events)]
            before = [event for event in own_events if event[1] == "on_before_backward"]
            steps = {"training_step", "validation_step", "test_step", "predict_step"}
            ours.events = [
                event
                for event in own_events
                if event[1] not in {"backward", "on_before_backward"} and not (event[0] == "module" and event[1] in steps)
            ]
            assert bool(before) == (rank == 1 and "on_after_backward" in {event[1] for event in events})
        elif variant.microbatches:
            events = split_events(events, variant.microbatches)
        check_shown(ours, plain, events, variant_name)
        if case.has_equal_values:
            check_values(ours, plain)
            assert files_below(folder / variant_name) == files_below(plain_folder)
            paths = [
                run.trainer.checkpoint_callback and run.trainer.checkpoint_callback.best_model_path.rpartition("/")[2]
                for run in (ours, plain)
            ]
            assert paths[0] == paths[1]


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", CASES)
def test_one_process_is_as_without_the_strategy(name, tmp_path):
    check_case(CASES[name], WORLD_1, tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_as_one(name, tmp_path, rank):
    check_case(CASES[name], WORLD_2, tmp_path, rank)
