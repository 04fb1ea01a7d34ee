"""Checkpoints of a Trainer are folders: of any mesh for any mesh, the same run again, safe, and kept as callbacks want."""

import functools
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from d9d.checkpoint.record import RECORD_NAME
from d9d_lightning import D9DStrategy, read_checkpoint
from d9d_lightning.data import elastic_dataloader
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    Regression,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 0, "atol": 0}
BATCH = 8
SHARD, REPLICATE = {"data_parallel_shard": 2}, {"data_parallel_replicate": 2}
PIPELINE = {"pipeline_parallel": 2}


class Odd(nn.Module):
    """A layer with parameters that no number of ranks divides, one of them without a gradient, and a scalar buffer."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(1, 17))
        self.narrow = nn.Parameter(torch.randn(NUM_FEATURES))
        self.uneven = nn.Linear(NUM_FEATURES, 5)
        self.back = nn.Linear(5, NUM_FEATURES)
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("count", torch.tensor(0))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        hidden = self.norm(self.uneven(x * self.narrow)) * self.wide.sum()
        return x + self.scale * self.back(hidden.tanh())


class OddStack(L.LightningModule):
    """Layers that a pipeline may cut, dropout outside of them, two groups and a schedule."""

    def __init__(self, width=NUM_FEATURES):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(*[Odd() for _ in range(4)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.layers(x)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        weights = [p for n, p in self.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)]


def loader_for(trainer, num_batches=2):
    ranks = trainer.strategy.distributed_sampler_kwargs
    return rank_loader(make_samples(num_batches * BATCH), BATCH, ranks["rank"], ranks["num_replicas"])


def on(mesh, **options):
    stages = {"pipeline_module": "layers", "microbatches": 2} if "pipeline_parallel" in mesh else {}
    return build_trainer(mesh, strategy_options=stages, **options)


def shared(path):
    """The path of rank 0, which all ranks know."""
    paths = [None] * dist.get_world_size()
    dist.all_gather_object(paths, str(path))
    return Path(paths[0])


def equal_checkpoints(one, other):
    one, other = (path if isinstance(path, dict) else read_checkpoint(path) for path in (one, other))
    assert list(one["state_dict"]) == list(other["state_dict"])
    for entry in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(one[entry], other[entry], **EXACT)
    for entry in ("epoch", "global_step", "lr_schedulers", "hyper_parameters"):
        assert one[entry] == other[entry]


def check_meshes(saved_on, loaded_on, folder):
    """What one mesh has saved is bit for bit what others save that have loaded it, and train on with alike."""
    folder = shared(folder)
    trainer = on(saved_on)
    # A mesh whose Trainer is gone would be built anew, when garbage collection has found it, at another time on each rank.
    trainers = [trainer]
    trainer.fit(seeded(OddStack), loader_for(trainer))
    trainer.save_checkpoint(folder / "first.ckpt")
    first = read_checkpoint(folder / "first.ckpt")
    assert first["optimizer_states"][0]["state"], "nothing was trained"
    for number, mesh in enumerate(loaded_on):
        # All epochs are done: nothing is trained.
        trainer = on(mesh)
        trainers.append(trainer)
        trainer.fit(seeded(OddStack, seed=number + 1), loader_for(trainer), ckpt_path=folder / "first.ckpt")
        trainer.save_checkpoint(folder / f"{number}.ckpt")
        equal_checkpoints(first, folder / f"{number}.ckpt")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("saved_on", [SHARD, PIPELINE], ids=str)
def test_two_ranks_to_any_mesh(saved_on, tmp_path):
    check_meshes(saved_on, [REPLICATE, SHARD, PIPELINE], tmp_path)


MESHES = [
    {"data_parallel_replicate": 4},
    {"data_parallel_shard": 4},
    {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    {"pipeline_parallel": 2, "data_parallel_shard": 2},
    {"pipeline_parallel": 4},
]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        (MESHES[3], [MESHES[1], MESHES[4]]),
        *(
            pytest.param(saved_on, [loaded_on], marks=pytest.mark.exhaustive)
            for saved_on in MESHES
            for loaded_on in MESHES
        ),
    ],
    ids=str,
)
def test_four_ranks_to_other_meshes(saved_on, loaded_on, tmp_path):
    check_meshes(saved_on, loaded_on, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where one test leaves a checkpoint of four ranks for the next ones."""
    return tmp_path_factory.mktemp("folders")


@pytest.mark.world_size(4)
def test_stages_and_shards_save(folder):
    trainer = on(MESHES[3])
    trainer.fit(seeded(OddStack), loader_for(trainer))
    trainer.save_checkpoint(folder / "four.ckpt")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [SHARD, PIPELINE], ids=str)
def test_fewer_ranks_resume(mesh, folder, tmp_path):
    path = shared(tmp_path)
    trainer = on(mesh)
    trainer.fit(seeded(OddStack, seed=1), loader_for(trainer), ckpt_path=folder / "four.ckpt")
    trainer.save_checkpoint(path / "two.ckpt")
    equal_checkpoints(folder / "four.ckpt", path / "two.ckpt")


def test_plain_lightning_takes_the_folder_or_the_file_made_of_it(folder, tmp_path):
    command = [sys.executable, "-m", "d9d_lightning", "consolidate", folder / "four.ckpt", tmp_path / "whole.ckpt"]
    subprocess.run(command, check=True, timeout=120)
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    equal_checkpoints(whole, folder / "four.ckpt")
    assert all(type(tensor) is torch.Tensor for tensor in whole["state_dict"].values())
    states = []
    for path in (folder / "four.ckpt", tmp_path / "whole.ckpt"):
        module = seeded(OddStack, seed=1)
        trainer = plain_trainer(max_epochs=2)
        trainer.fit(module, rank_loader(make_samples(2 * BATCH), BATCH, 0, 1), ckpt_path=path)
        assert trainer.global_step == 4
        states.append(module.state_dict())
        loaded = OddStack.load_from_checkpoint(path)
        assert loaded.hparams == {"width": NUM_FEATURES}
        expected = {name: tensor.to(loaded.state_dict()[name].dtype) for name, tensor in whole["state_dict"].items()}
        torch.testing.assert_close(dict(loaded.state_dict()), expected, **EXACT)
    torch.testing.assert_close(*states, **EXACT)


# ---- the same run again ----------------------------------------------------------------------------------------------


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, x.sum().sin(), index


class Dropping(L.LightningModule):
    """With dropout and a schedule; notes what a resume must repeat."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Tanh()) for _ in range(2)]
        )
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(NUM_FEATURES, 1)
        self.notes = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        loss = F.mse_loss(self.head(self.drop(self.blocks(x))).squeeze(-1), y)
        rate = self.optimizers().param_groups[0]["lr"]
        self.notes.append((self.trainer.global_step, index.tolist(), loss.item(), rate))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def run_dropping(mesh, folder=None, *, max_steps=12, ckpt_path=None):
    saves = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = build_trainer(
        mesh,
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=saves,
        enable_checkpointing=bool(saves),
    )
    module = seeded(Dropping)
    torch.manual_seed(3)
    trainer.fit(module, elastic_dataloader(Numbered(), global_batch_size=8, batch_size=2), ckpt_path=ckpt_path)
    return module


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=str)
def test_a_resumed_run_is_the_same_run(mesh, tmp_path):
    """12 steps of 2 batches, and with two resumes: in an epoch, which has 5 steps, and at the end of one. Dropout is on."""
    path = shared(tmp_path)
    whole = run_dropping(mesh)
    run_dropping(mesh, path / "first", max_steps=3)
    second = run_dropping(mesh, path / "second", max_steps=10, ckpt_path=path / "first" / "step=3.ckpt")
    third = run_dropping(mesh, ckpt_path=path / "second" / "step=10.ckpt")
    fourth = run_dropping(mesh, ckpt_path=path / "second" / "step=7.ckpt")
    assert second.notes == whole.notes[2 * 3 : 2 * 10]
    assert third.notes == whole.notes[2 * 10 :]
    assert fourth.notes == whole.notes[2 * 7 :]
    for module in (third, fourth):
        torch.testing.assert_close(full_state(module), full_state(whole), **EXACT)


def test_a_shuffled_loader_goes_on_alike_at_the_end_of_an_epoch(tmp_path):
    """On one process, where the order is drawn from the global generator."""

    def fit(max_epochs, ckpt_path=None):
        module = seeded(Dropping)
        torch.manual_seed(11)
        trainer = plain_trainer(strategy=D9DStrategy(), max_epochs=max_epochs)
        trainer.fit(module, DataLoader(Numbered(), 8, shuffle=True), ckpt_path=ckpt_path)
        return trainer, module

    _, whole = fit(3)
    trainer, first = fit(1)
    trainer.save_checkpoint(tmp_path / "a")
    torch.manual_seed(99)
    _, rest = fit(3, tmp_path / "a")
    assert first.notes + rest.notes == whole.notes


class BatchNormed(Regression):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)

    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.world_size(2)
def test_statistics_are_those_of_rank_0(tmp_path):
    path = shared(tmp_path)
    trainer = on(REPLICATE)
    module = seeded(BatchNormed)
    trainer.fit(module, loader_for(trainer))
    module.norm.running_mean.fill_(float(dist.get_rank()))
    trainer.save_checkpoint(path / "a")
    assert read_checkpoint(path / "a")["state_dict"]["norm.running_mean"].tolist() == [0.0] * NUM_FEATURES


# ---- callbacks ---------------------------------------------------------------------------------------------------


class Scored(Regression):
    """Validation has a given score at each validation."""

    def __init__(self, scores=(3.0, 1.0, 2.0, 4.0, 0.5, 6.0)):
        super().__init__()
        self.scores = iter(scores)

    def on_before_optimizer_step(self, optimizer):
        pass

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        self.log("score", next(self.scores), sync_dist=True)


def names_in(folder):
    # Rank 0 may still be about to release its lock.
    found = [path for path in folder.iterdir() if path.name != ".lock"]
    assert all((path / RECORD_NAME).exists() for path in found)
    return sorted(path.name for path in found)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [SHARD, PIPELINE], ids=str)
@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO], ids=["foreground", "background"])
def test_top_k_and_last(mesh, plugin, tmp_path):
    folder = shared(tmp_path) / "kept"
    build = OddScored if mesh == PIPELINE else Scored
    scores = (3.0, 1.0, 2.0, 4.0)
    options = {"filename": "{step}", "monitor": "score", "save_top_k": 2, "save_last": True}
    checkpoint = ModelCheckpoint(folder, **options)
    plugins = [] if plugin is None else [plugin()]
    trainer = on(mesh, max_epochs=2, val_check_interval=2, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.strategy.checkpoint_io = plugins[0] if plugins else None
    loader = loader_for(trainer, num_batches=4)
    trainer.fit(seeded(functools.partial(build, scores)), loader, loader)
    # Validations are behind steps 2, 4, 6 and 8, in the middle and at the end of both epochs.
    best_two = sorted(zip(scores, (2, 4, 6, 8), strict=True))[:2]
    assert names_in(folder) == sorted(["last.ckpt", *(f"step={step}.ckpt" for _, step in best_two)])
    assert Path(checkpoint.best_model_path).name == f"step={best_two[0][1]}.ckpt"
    # Lightning saves the last one together with another one: nothing was among the best behind step 8.
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 6
    # What is best survives a resume, and so do the rules.
    again = ModelCheckpoint(folder, **options)
    resumed = on(mesh, max_epochs=3, val_check_interval=2, callbacks=[again], enable_checkpointing=True)
    resumed.fit(seeded(functools.partial(build, (4.0, 5.0, 0.5))), loader, loader, ckpt_path="last")
    assert resumed.global_step == 12
    assert names_in(folder) == ["last.ckpt", "step=12.ckpt", "step=4.ckpt"]
    assert again.best_model_score == 0.5


class OddScored(OddStack):
    def __init__(self, scores):
        super().__init__()
        self.scores = iter(scores)

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    on_validation_epoch_end = Scored.on_validation_epoch_end


@pytest.mark.world_size(2)
def test_steps_times_and_links(tmp_path):
    path = shared(tmp_path)
    by_steps = ModelCheckpoint(
        path / "steps", filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last="link"
    )
    by_time = ModelCheckpoint(path / "time", filename="{step}", train_time_interval=timedelta(0), save_top_k=-1)
    trainer = on(SHARD, callbacks=[by_steps, by_time], enable_checkpointing=True)
    trainer.fit(seeded(Regression), loader_for(trainer, num_batches=5))
    assert names_in(path / "steps") == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert (path / "steps" / "last.ckpt").is_symlink()
    assert names_in(path / "time") == [f"step={step}.ckpt" for step in range(1, 6)]
    # Through the link, which is replaced and never followed.
    again = ModelCheckpoint(path / "steps", filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last="link")
    resumed = on(SHARD, max_epochs=2, callbacks=[again], enable_checkpointing=True)
    resumed.fit(seeded(Regression), loader_for(resumed, num_batches=5), ckpt_path="last")
    assert (path / "steps" / "last.ckpt").resolve().name == "step=10.ckpt"
    assert len(names_in(path / "steps")) == 6


class BoomError(ValueError):
    pass


class Failing(Regression):
    fails = True

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.global_step == 2:
            raise BoomError("boom")
        return super().training_step(batch, batch_idx)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO], ids=["foreground", "background"])
def test_what_is_saved_on_an_exception_is_resumed_from(plugin, tmp_path):
    path = shared(tmp_path)
    trainer = on(SHARD, callbacks=[OnExceptionCheckpoint(path)], enable_checkpointing=True)
    trainer.strategy.checkpoint_io = None if plugin is None else plugin()
    with pytest.raises(BoomError):
        trainer.fit(seeded(Failing), loader_for(trainer, num_batches=4))
    assert names_in(path) == ["on_exception.ckpt"]
    module = seeded(Failing, seed=1)
    module.fails = False
    resumed = on(SHARD, callbacks=[OnExceptionCheckpoint(path)], enable_checkpointing=True)
    resumed.fit(module, loader_for(resumed, num_batches=4))
    assert len(module.losses) == 2
    dist.barrier()
    assert not list(path.iterdir())  # Lightning removes it when all went well
