"""Callbacks, norms, summaries and failures where ranks have different stages."""

import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder, ModelSummary, OnExceptionCheckpoint, RichProgressBar
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm

from d9d_lightning import grad_norm, read_checkpoint
from d9d_lightning.callbacks import EMAWeightAveraging, GradientNormLogger
from d9d_lightning.jobs import failures
from tests.d9d_lightning.support import build_trainer, make_samples, plain_trainer, rank_loader, seeded
from tests.d9d_lightning.test_pipeline_parity import BATCH, Stack

MESHES = {
    2: {"pipeline_parallel": 2},
    4: {"pipeline_parallel": 2, "data_parallel_shard": 2},
}
PIPELINE = {"pipeline_module": "model", "microbatches": 2}
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}
DECAY = 0.75


class Normed(Stack):
    def __init__(self):
        super().__init__()
        self.norms = []
        self.validated = []

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        # Lightning's own where it can be used.
        measure = grad_norm if dist.is_initialized() and self._trainer.world_size > 1 else lightning_grad_norm
        self.norms.append(measure(self, 2))

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.validated.append(float(loss))
        self.log("val_loss", loss)


def loaders(rank, world_size):
    loader = rank_loader(make_samples(3 * BATCH), BATCH, rank, world_size)
    return {"train_dataloaders": loader, "val_dataloaders": loader}


def fit(mesh, module, **options):
    trainer = build_trainer(mesh, strategy_options=PIPELINE, **options)
    trainer.fit(
        module, **loaders(trainer.strategy.distributed_sampler_kwargs["rank"], trainer.strategy.mesh.data_parallel)
    )
    return trainer


def fit_one(module, **options):
    trainer = plain_trainer(**options)
    trainer.fit(module, **loaders(0, 1))
    return trainer


def check_averages(mesh, directory):
    module, one = seeded(Normed), seeded(Normed)
    trainer = fit(mesh, module, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2)
    fit_one(one, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2)
    trainer.save_checkpoint(directory / "end.ckpt")
    checkpoint = read_checkpoint(directory / "end.ckpt")
    torch.testing.assert_close(checkpoint["state_dict"], one.state_dict(), **TOLERANCE)
    assert list(checkpoint["current_model_state"]) == list(checkpoint["state_dict"])
    # Halfway, and on from there: on the mesh and on one process.
    half = fit(mesh, seeded(Normed), callbacks=[EMAWeightAveraging(DECAY)])
    half.save_checkpoint(directory / "half.ckpt")
    resumed = build_trainer(mesh, strategy_options=PIPELINE, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2)
    samples = loaders(resumed.strategy.distributed_sampler_kwargs["rank"], resumed.strategy.mesh.data_parallel)
    resumed.fit(seeded(Normed, seed=3), **samples, ckpt_path=directory / "half.ckpt", weights_only=True)
    resumed.save_checkpoint(directory / "resumed.ckpt")
    resumed_state = read_checkpoint(directory / "resumed.ckpt")
    torch.testing.assert_close(resumed_state["state_dict"], one.state_dict(), **TOLERANCE)
    torch.testing.assert_close(resumed_state["current_model_state"], checkpoint["current_model_state"], **TOLERANCE)


@pytest.mark.world_size(2)
def test_averages_of_stages(tmp_path):
    check_averages(MESHES[2], tmp_path)


@pytest.mark.world_size(4)
def test_averages_of_sharded_stages(tmp_path):
    check_averages(MESHES[4], tmp_path)


def check_norms(mesh):
    module, one = seeded(Normed), seeded(Normed)
    trainer = fit(mesh, module, callbacks=[GradientNormLogger()])
    fit_one(one)
    for seen, expected in zip(module.norms, one.norms, strict=True):
        assert set(seen) == set(expected)
        torch.testing.assert_close(seen, {name: expected[name] for name in seen}, rtol=1e-6, atol=1e-9)
    total = float(one.norms[-1]["grad_2.0_norm_total"])
    assert float(trainer.callback_metrics["grad_norm"]) == pytest.approx(total)


@pytest.mark.world_size(2)
def test_norms_of_stages():
    check_norms(MESHES[2])


@pytest.mark.world_size(4)
def test_norms_of_sharded_stages():
    check_norms(MESHES[4])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("max_depth", [1, 2])
def test_summary_is_of_the_whole_model(max_depth):
    class Kept(ModelSummary):
        @staticmethod
        def summarize(summary_data, *totals, **kwargs):
            kept.append((dict(summary_data), totals, kwargs))

    kept = []
    fit_one(seeded(Normed), callbacks=[Kept(max_depth)])
    module = seeded(Normed)
    fit(MESHES[2], module, callbacks=[Kept(max_depth)])
    if dist.get_rank() == 0:
        one, (columns, totals, kwargs) = kept
        on_rank = columns.pop("Params per Device")
        assert (columns, totals, kwargs) == one
        # Two of four blocks of 8 x 8 + 8; embedding 56 and head 9 are on all ranks.
        counts = dict(zip(columns["Name"], map(str.strip, on_rank), strict=True))
        assert (counts["embed"], counts["model"], counts["head"]) == ("56", "144", "9")
    # The same module again: the whole of it is not there any more.
    fit(MESHES[2], module, callbacks=[Kept(max_depth)])
    assert dist.get_rank() != 0 or kept[-1][1] == kept[0][1]


class Failing(Stack):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


@pytest.mark.world_size(2)
def test_a_failing_stage_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "LIMIT_S", 0.5)
    start_s = time.monotonic()
    callbacks = [OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(RuntimeError if dist.get_rank() == 0 else Exception, match="boom"):
        fit(MESHES[2], seeded(Failing), callbacks=callbacks, enable_checkpointing=True)
    assert time.monotonic() - start_s < 10
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}  # which rank 0 may still be about to release


@pytest.mark.world_size(2)
def test_norm_of_a_part_is_refused():
    class Part(Stack):
        def on_before_optimizer_step(self, optimizer):
            grad_norm(self.model, 2)

    with pytest.raises(NotImplementedError, match="pick the names"):
        fit(MESHES[2], seeded(Part))


class Rated(Stack):
    """Has a learning rate to be found, and shows its loss."""

    def __init__(self):
        super().__init__()
        self.lr = 1e-2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("shown", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.world_size(2)
def test_the_learning_rate_is_found_as_on_one_process(tmp_path):
    found = []
    for run in (lambda *args, **options: fit(MESHES[2], *args, **options), fit_one):
        module = seeded(Rated)
        finder = LearningRateFinder(min_lr=1e-3, max_lr=1.0, num_training_steps=12, early_stop_threshold=None)
        run(module, callbacks=[finder], max_epochs=4, default_root_dir=tmp_path)
        found.append((finder.optimal_lr.results, finder.optimal_lr.suggestion(skip_begin=2)))
    (results, rate), (expected, expected_rate) = found
    assert len(results["loss"]) == 12
    assert results["lr"] == expected["lr"]
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert rate == expected_rate is not None


@pytest.mark.world_size(2)
def test_rich_bars_show_the_last_stage():
    bar, module = RichProgressBar(), seeded(Rated)
    fit(MESHES[2], module, callbacks=[bar], enable_progress_bar=True)
    one = seeded(Rated)
    trainer = fit_one(one)
    shown = bar.get_metrics(module.trainer, module)
    assert shown["shown"] == pytest.approx(float(trainer.callback_metrics["shown"]), rel=1e-6)
    assert bar.is_enabled == (dist.get_rank() == 0)
