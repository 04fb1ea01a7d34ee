"""What the Trainer can do is the same under D9DStrategy as under Lightning's own strategy: hooks, counters, values."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops.optimization.automatic import Closure

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
from tests.d9d_lightning.lightning_cases import CASES, SAMPLE, Scheduled, options

# Lightning adds logged values up in float32.
CLOSE = {"rel": 2e-6, "abs": 2e-6}
LOG_TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}
# What shows the last batch under Lightning, and a whole window under a pipeline.
STEP_KEYS = {"loss", "loss_step"}

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


@pytest.mark.world_size(1)
def test_batches_that_are_skipped_are_told_of(tmp_path):
    # Lightning says it once in a process.
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        run_ours(Case(module=Skips), WORLD_1["split"], tmp_path)


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
