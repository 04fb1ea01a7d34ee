"""What the Trainer can do is the same under D9DStrategy as under Lightning's own strategy: hooks, counters, values."""

import dataclasses
import os

import lightning as L
import pytest
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

from d9d_lightning import D9DStrategy
from d9d_lightning.jobs import failures
from tests.d9d_lightning.differential import (
    BATCH,
    WEIGHT_TOLERANCE,
    WORLD_1,
    WORLD_2,
    Case,
    Probe,
    pipeline_events,
    run_ours,
    run_plain,
    split_events,
    without_steps,
)

# Lightning adds logged values up in float32.
CLOSE = {"rel": 2e-6, "abs": 2e-6}
LOG_TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}
# What shows the last batch under Lightning, and a whole window under a pipeline.
STEP_KEYS = {"loss", "loss_step"}


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
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


def best_checkpoint(run):
    checkpoint = run.trainer.checkpoint_callback
    return checkpoint and checkpoint.best_model_path.rpartition("/")[2]


def check_hooks(own, lightning, variant):
    events = lightning.events
    if not variant.has_pipeline:
        assert own.events == (split_events(events, variant.microbatches) if variant.microbatches else events)
        return
    own_events, names = without_steps(own.events), {name for _, name, *_ in own.events}
    assert own_events == pipeline_events(events)
    has_last_stage = dist.get_rank() >= dist.get_world_size() // 2
    assert ("on_before_backward" in names) == (has_last_stage and "on_after_backward" in names)


def check_counters(own, lightning, *, gives_window_up):
    trainers = own.trainer, lightning.trainer
    assert len({trainer.global_step for trainer in trainers}) == 1
    assert len({trainer.current_epoch for trainer in trainers}) == 1
    own_state, state = (trainer.fit_loop.state_dict() for trainer in trainers)
    if gives_window_up:
        # A window that never ran was not zeroed for, and has logged nothing.
        for each in (own_state, state):
            del each["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    else:
        assert [(step, sorted(row)) for step, row in own.rows] == [(step, sorted(row)) for step, row in lightning.rows]
    assert own_state == state
    rates = [[group["lr"] for group in trainer.optimizers[0].param_groups] for trainer in trainers]
    assert rates[0] == rates[1]


def check_values(own, lightning, *, has_waiting):
    """Compare what was logged. Batches that wait have logged nothing yet, and the step then shows the whole window."""
    for rows, expected_rows in ((own.rows, lightning.rows), (own.values, lightning.values)):
        for (when, row), (_, expected) in zip(rows, expected_rows, strict=True):
            if not has_waiting or when != "on_train_batch_end":
                keys = [key for key in expected if not (has_waiting and key in STEP_KEYS)]
                assert {key: row[key] for key in keys} == pytest.approx({key: expected[key] for key in keys}, **CLOSE)
    weights = lightning.weights
    own_weights = {name: tensor for name, tensor in own.weights.items() if "error" not in name}
    torch.testing.assert_close(own_weights, {name: weights[name] for name in own_weights}, **WEIGHT_TOLERANCE)
    torch.testing.assert_close(own.result, lightning.result, **LOG_TOLERANCE)


def check_case(case, variants, folder):
    lightning_folder = folder / f"lightning{os.environ['RANK']}"
    lightning = run_plain(case, lightning_folder)
    for name, variant in variants.items():
        own = run_ours(case, variant, folder / name)
        check_hooks(own, lightning, variant)
        check_counters(own, lightning, gives_window_up=variant.has_pipeline and case.gives_window_up)
        if case.has_equal_values and not (variant.has_pipeline and case.gives_window_up):
            has_waiting = variant.has_pipeline and case.has_windows
            check_values(own, lightning, has_waiting=has_waiting)
            assert files_below(folder / name) == files_below(lightning_folder)
            assert best_checkpoint(own) == best_checkpoint(lightning)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", NAMES)
def test_one_process_is_as_without_the_strategy(name, tmp_path):
    check_case(CASES[name], WORLD_1, tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_as_one(name, tmp_path):
    check_case(CASES[name], WORLD_2, tmp_path)


WORLD_4 = {
    "pipelines": dataclasses.replace(
        WORLD_2["pipeline"], mesh={"pipeline_parallel": 2, "data_parallel_replicate": 2}, microbatches=2
    )
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["plain", "logs", "accumulate_2", "best_checkpoint", "reduce_on_plateau", "clip_norm"])
def test_replicas_of_pipelines_are_as_one_process(name, tmp_path):
    check_case(CASES[name], WORLD_4, tmp_path)


# What needs more than one call of the Trainer, or ends in an error


def check_resume(variants, folder):
    """Three of eight steps, a checkpoint, and the rest in a new Trainer, under Lightning and under ours."""

    def fit_and_save(trainer, module, data):
        trainer.fit(module, **data)
        trainer.save_checkpoint(folder / "three.ckpt")

    def resume(trainer, module, data):
        trainer.fit(module, **data, ckpt_path=folder / "three.ckpt")

    first = Case(options(max_epochs=2, max_steps=3), Scheduled, act=fit_and_save)
    rest = Case(options(max_epochs=2), Scheduled, act=resume)
    folder = folder / os.environ["RANK"]
    run_plain(first, folder)
    lightning = run_plain(rest, folder)
    folder = folder.parent
    for variant in variants.values():
        run_ours(first, variant, folder)
        own = run_ours(rest, variant, folder)
        check_counters(own, lightning, gives_window_up=False)
        check_values(own, lightning, has_waiting=False)


@pytest.mark.world_size(1)
def test_one_process_resumes_within_an_epoch(tmp_path):
    check_resume(WORLD_1, tmp_path)


@pytest.mark.world_size(2)
def test_two_processes_resume_within_an_epoch(tmp_path):
    check_resume(WORLD_2, tmp_path)


class Skips(Probe):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@pytest.mark.world_size(1)
def test_a_step_of_one_process_may_return_none(tmp_path):
    check_case(Case(module=Skips), WORLD_1, tmp_path)


class SkipsOnOneRank(Probe):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and os.environ["RANK"] == "1" else loss


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", WORLD_2)
def test_a_step_of_several_ranks_may_not_return_none(name, tmp_path, monkeypatch):
    """A4: the rank that skips says so, and the others do not wait for it."""
    monkeypatch.setattr(failures, "LIMIT_S", 0.5)
    with pytest.raises(Exception, match=r"None|closed|rank") as caught:
        run_ours(Case(module=SkipsOnOneRank if name == "replicate" else Skips), WORLD_2[name], tmp_path)
    if name == "pipeline" or os.environ["RANK"] == "1":
        assert "return" in str(caught.value)
        assert "None" in str(caught.value)


class Manual(Probe):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net, self.head)]


@pytest.mark.world_size(1)
def test_manual_optimization_of_one_process_is_lightnings(tmp_path):
    check_case(Case(module=Manual), {"native": WORLD_1["native"]}, tmp_path)


@pytest.mark.world_size(2)
def test_manual_optimization_of_replicas_is_lightnings(tmp_path):
    check_case(Case(module=Manual), {"replicate": WORLD_2["replicate"]}, tmp_path)


@pytest.mark.world_size(1)
def test_manual_optimization_gets_whole_batches(tmp_path):
    (tmp_path / "native").mkdir()
    whole = run_ours(Case(module=Manual), WORLD_1["native"], tmp_path / "native")
    with pytest.warns(UserWarning, match=r"microbatches=2 does nothing"):
        run = run_ours(Case(module=Manual), WORLD_1["split"], tmp_path)
    assert run.events == whole.events
    torch.testing.assert_close(run.module.state_dict(), whole.module.state_dict(), rtol=0, atol=0)


@pytest.mark.world_size(2)
def test_manual_optimization_is_refused_in_a_pipeline(tmp_path):
    with pytest.raises(NotImplementedError, match="pipeline_parallel"):
        run_ours(Case(module=Manual), WORLD_2["pipeline"], tmp_path)


class LineSearch(Probe):
    """Its optimizer runs the step as often as it likes."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.world_size(1)
def test_an_optimizer_may_run_a_step_again(tmp_path):
    check_case(Case(options(limit_train_batches=2), LineSearch), {"native": WORLD_1["native"]}, tmp_path)
    own = run_ours(Case(options(limit_train_batches=2), LineSearch), WORLD_1["split"], tmp_path)
    lightning = run_plain(Case(options(limit_train_batches=2), LineSearch), tmp_path)
    names = dict(own.module.named_parameters())
    torch.testing.assert_close(
        {name: own.weights[name] for name in names},
        {name: lightning.weights[name] for name in names},
        **WEIGHT_TOLERANCE,
    )


@pytest.mark.world_size(2)
def test_an_optimizer_that_looks_at_all_parameters_is_refused_in_a_pipeline(tmp_path):
    with pytest.raises(NotImplementedError, match="LBFGS"):
        run_ours(Case(module=LineSearch), WORLD_2["pipeline"], tmp_path)


# A step is the same however its eight samples are cut: samples of a batch, batches of a window, microbatches of a batch.
CUTS = [(8, 1, None), (8, 1, 4), (4, 2, None), (4, 2, 2), (2, 4, None), (1, 8, None)]


class Normed(Probe):
    def on_before_optimizer_step(self, optimizer):
        self.norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()


def check_cuts(variant, folder):
    def of(batch_size, window):
        options = {"accumulate_grad_batches": window, "gradient_clip_val": 1e9, "limit_val_batches": 0}
        return Case(lambda folder: dict(options), Normed, num_train=16 // BATCH, batch_size=batch_size)

    lightning = run_plain(of(8, 1), folder)
    for batch_size, window, microbatches in CUTS:
        own = run_ours(of(batch_size, window), dataclasses.replace(variant, microbatches=microbatches), folder)
        assert own.trainer.global_step == lightning.trainer.global_step == 2
        torch.testing.assert_close(own.trainer.strategy.last_grad_norm, lightning.module.norm, **WEIGHT_TOLERANCE)
        losses = [run.trainer.callback_metrics["loss_epoch"] for run in (own, lightning)]
        torch.testing.assert_close(*losses, **LOG_TOLERANCE)
        weights = {name: tensor for name, tensor in own.weights.items() if "error" not in name}
        torch.testing.assert_close(weights, {name: lightning.weights[name] for name in weights}, **WEIGHT_TOLERANCE)


@pytest.mark.world_size(1)
def test_a_step_of_one_process_is_the_same_however_it_is_cut(tmp_path):
    check_cuts(WORLD_1["native"], tmp_path)


@pytest.mark.world_size(2)
def test_a_step_of_a_pipeline_is_the_same_however_it_is_cut(tmp_path):
    check_cuts(WORLD_2["pipeline"], tmp_path)
