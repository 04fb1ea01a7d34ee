"""Checkpoints of pipelines: the files of plain Lightning, saved, resumed, tested and kept by callbacks."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from d9d_lightning import D9DStrategy, read_checkpoint
from tests.d9d_lightning.support import build_trainer, full_state, make_samples, plain_trainer, rank_loader, seeded
from tests.d9d_lightning.test_pipeline_parity import BATCH, TOLERANCE, Stack

NUM_BATCHES = 2
CLOSE = {"rtol": TOLERANCE, "atol": TOLERANCE}
MESHES = {
    2: ({"pipeline_parallel": 2}, "1f1b"),
    4: ({"pipeline_parallel": 2, "data_parallel_shard": 2}, "interleaved"),
}


class Grouped(Stack):
    """With weight decay for weights only, a schedule, and a loss to validate and test."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        weights = [p for n, p in self.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        optimizer = torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loaders(trainer):
    strategy = trainer.strategy
    rank, size = (
        (strategy.distributed_sampler_kwargs["rank"], strategy.mesh.data_parallel)
        if isinstance(strategy, D9DStrategy)
        else (0, 1)
    )
    loader = rank_loader(make_samples(NUM_BATCHES * BATCH), BATCH, rank, size)
    return {"train_dataloaders": loader, "val_dataloaders": loader}


def pipeline_trainer(size, **options):
    mesh, schedule = MESHES[size]
    strategy_options = {"pipeline_module": "model", "schedule": schedule, "microbatches": 2}
    return build_trainer(mesh, strategy_options=strategy_options, **options)


def fit(trainer, module, ckpt_path=None):
    trainer.fit(module, **loaders(trainer), ckpt_path=ckpt_path)
    return module


def check_files(size, directory):
    """A file is that of plain Lightning, and each of both resumes from that of the other."""
    plain = plain_trainer()
    fit(plain, seeded(Grouped))
    if dist.get_rank() == 0:
        plain.save_checkpoint(directory / "plain.ckpt")
    trainer = pipeline_trainer(size)
    fit(trainer, seeded(Grouped))
    trainer.save_checkpoint(directory / "stages.ckpt")
    trainer.save_checkpoint(directory / "weights.ckpt", weights_only=True)
    expected = torch.load(directory / "plain.ckpt", weights_only=True)
    saved = read_checkpoint(directory / "stages.ckpt")
    assert list(saved) == list(expected)
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    for entry in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(saved[entry], expected[entry], **CLOSE)
    for entry in ("epoch", "global_step", "lr_schedulers"):
        assert saved[entry] == expected[entry]
    weights = read_checkpoint(directory / "weights.ckpt")
    assert "optimizer_states" not in weights
    torch.testing.assert_close(weights["state_dict"], saved["state_dict"], rtol=0, atol=0)

    twice = fit(plain_trainer(max_epochs=2), seeded(Grouped))
    for name in ("plain", "stages"):
        resumed = fit(pipeline_trainer(size, max_epochs=2), seeded(Grouped, seed=3), directory / f"{name}.ckpt")
        state = full_state(resumed)
        torch.testing.assert_close(state, {key: twice.state_dict()[key] for key in state}, **CLOSE)
    resumed = fit(plain_trainer(max_epochs=2), seeded(Grouped, seed=3), directory / "stages.ckpt")
    torch.testing.assert_close(dict(resumed.state_dict()), dict(twice.state_dict()), **CLOSE)


@pytest.mark.world_size(2)
def test_files_of_two_stages(tmp_path):
    check_files(2, tmp_path)


@pytest.mark.world_size(4)
def test_files_of_interleaved_and_sharded_stages(tmp_path):
    check_files(4, tmp_path)


def check_callbacks(size, directory):
    """The best file is the same on all ranks, and `test` loads it; also with a new Trainer, and saves afterwards."""
    checkpoint = ModelCheckpoint(directory / str(dist.get_rank()), monitor="val_loss", save_top_k=1, save_last=True)
    trainer = pipeline_trainer(size, max_epochs=3, enable_checkpointing=True, callbacks=[checkpoint])
    module = fit(trainer, seeded(Grouped))
    paths = [None] * size
    dist.all_gather_object(paths, (checkpoint.best_model_path, checkpoint.best_model_score.item()))
    assert paths == [paths[0]] * size
    assert checkpoint.best_model_path.startswith(str(directory / "0"))
    last = read_checkpoint(checkpoint.last_model_path)
    for tester in (trainer, pipeline_trainer(size)):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        path = "best" if tester is trainer else checkpoint.best_model_path
        [result] = tester.test(module, loaders(tester)["val_dataloaders"], ckpt_path=path, verbose=False)
        assert result["val_loss"] == pytest.approx(checkpoint.best_model_score.item(), rel=1e-6)
        tester.save_checkpoint(directory / "after.ckpt")
        after = read_checkpoint(directory / "after.ckpt")["state_dict"]
        best = read_checkpoint(checkpoint.best_model_path)["state_dict"]
        torch.testing.assert_close(after, best, rtol=0, atol=0)
        assert list(after) == list(last["state_dict"])


@pytest.mark.world_size(2)
def test_callbacks_of_two_stages(tmp_path):
    check_callbacks(2, tmp_path)


@pytest.mark.world_size(4)
def test_callbacks_of_interleaved_and_sharded_stages(tmp_path):
    check_callbacks(4, tmp_path)


class Loaded(Grouped):
    def train_dataloader(self):
        # In the process that trains.
        return loaders(self.trainer)["train_dataloaders"]

    def val_dataloader(self):
        return loaders(self.trainer)["val_dataloaders"]


def test_weights_of_forked_stages_come_back(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    expected, reference = seeded(Loaded), plain_trainer()
    reference.fit(expected)
    strategy = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="model", microbatches=2, launcher="fork")
    trainer = plain_trainer(strategy=strategy, devices=2)
    module = seeded(Loaded)
    trainer.fit(module)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), **CLOSE)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(reference.callback_metrics["val_loss"].item())


class Divided(Grouped):
    """Orders its groups by hand, against the order of the module."""

    def configure_optimizers(self):
        return torch.optim.SGD([*self.head.parameters(), *self.model.parameters(), *self.embed.parameters()], lr=0.1)


@pytest.mark.world_size(2)
def test_groups_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"group 0: parameters are not in the order of named_parameters\(\)"):
        fit(pipeline_trainer(2), seeded(Divided))
