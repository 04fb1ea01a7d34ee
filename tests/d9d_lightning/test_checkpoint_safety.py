"""Checkpoints of a Trainer: what is hostile, damaged, missing, other than asked for or not storable is refused by name."""

import enum
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from d9d.checkpoint.record import RECORD_NAME, CommitRecord, FileDigest, digest_file
from d9d_lightning import D9DStrategy, consolidate, read_checkpoint
from d9d_lightning.checkpoints.saved_tensors import SavedTensors
from tests.d9d_lightning.support import (
    Regression,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 0, "atol": 0}
SHARD, REPLICATE = {"data_parallel_shard": 2}, {"data_parallel_replicate": 2}


def shared(path):
    """The path of rank 0, which all ranks know."""
    paths = [None] * dist.get_world_size()
    dist.all_gather_object(paths, str(path))
    return Path(paths[0])


def loader():
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return rank_loader(make_samples(16), 8, rank, size)


def fit(mesh, module=None, ckpt_path=None, **options):
    options = {"max_epochs": 1 if ckpt_path is None else 2, **options}
    trainer = build_trainer(mesh, **options) if mesh else plain_trainer(strategy=D9DStrategy(), **options)
    module = module or seeded(Regression)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, module


# ---- hostile ---------------------------------------------------------------------------------------------------------


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(params=["", "1"], ids=["by_default", "full_loading_forced"])
def environment(request, monkeypatch):
    if request.param:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", request.param)


def sealed(folder, name, data):
    """Exchange a file of a checkpoint, and the digests with it, as someone who can write to the disk."""
    (folder / name).write_bytes(data)
    record = CommitRecord.read(folder)
    files = {**record.files, name: digest_file(folder / name)}
    other = CommitRecord(step=record.step, num_ranks=record.num_ranks, files=files)
    (folder / RECORD_NAME).write_bytes(other.to_bytes())


@pytest.mark.usefixtures("environment")
def test_hostile_files_run_nothing(tmp_path):
    marker = tmp_path / "marker"
    torch.save({"state_dict": {}, "x": Hostile(marker)}, tmp_path / "hostile.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        fit({}, ckpt_path=tmp_path / "hostile.ckpt")
    assert not marker.exists()


@pytest.mark.usefixtures("environment")
def test_hostile_folders_run_nothing(tmp_path):
    trainer, _ = fit({})
    marker = tmp_path / "marker"
    attempts = {".metadata": pickle.dumps(Hostile(marker)), "__0_0.distcp": pickle.dumps(Hostile(marker)) * 1000}
    for number, (name, data) in enumerate(attempts.items()):
        path = tmp_path / f"{number}.ckpt"
        trainer.save_checkpoint(path)
        sealed(path, name, data)
        loads = [
            lambda path=path: fit({}, ckpt_path=path),
            lambda path=path: Regression.load_from_checkpoint(path, weights_only=False),
            lambda path=path: consolidate(path, tmp_path / "out"),
        ]
        for load in loads:
            if name == ".metadata":
                load()  # never read
            else:
                with pytest.raises((pickle.UnpicklingError, RuntimeError, ValueError)):
                    load()
    assert not marker.exists()


def test_a_class_path_in_a_checkpoint_is_not_imported(tmp_path):
    trainer, _ = fit({})
    trainer.lightning_module.hparams["_instantiator"] = "os.system"
    trainer.save_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match="not in the allowlist"):
        Regression.load_from_checkpoint(tmp_path / "a")


# ---- damaged and missing -----------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_damage_is_found_on_all_ranks_and_another_one_is_named(tmp_path):
    path = shared(tmp_path)
    trainer, _ = fit(SHARD)
    trainer.save_checkpoint(path / "older.ckpt")
    trainer.save_checkpoint(path / "newer.ckpt")
    dist.barrier()
    if dist.get_rank() == 0:
        victim = path / "newer.ckpt" / "__1_0.distcp"
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    dist.barrier()
    with pytest.raises(
        ValueError, match=r"(?s)newer\.ckpt.*__1_0\.distcp is damaged.*other one there is .*older\.ckpt"
    ):
        fit(SHARD, ckpt_path=path / "newer.ckpt")
    fit(SHARD, ckpt_path=path / "older.ckpt")
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*gone"):
        fit(SHARD, ckpt_path=path / "gone")


@pytest.mark.world_size(2)
def test_ranks_that_see_other_checkpoints(tmp_path):
    path = shared(tmp_path)
    trainer, _ = fit(REPLICATE)
    trainer.save_checkpoint(path / "a")
    with pytest.raises(ValueError, match=r"some ranks resume from .*, and rank 1 found no checkpoint"):
        fit(REPLICATE, max_epochs=2, ckpt_path=path / "a" if dist.get_rank() == 0 else None)
    # Where all have one, that of rank 0 counts.
    _, module = fit(REPLICATE, ckpt_path=path / "a" if dist.get_rank() == 0 else path / "elsewhere")
    assert module.trainer.global_step == 4


@pytest.mark.world_size(2)
def test_a_save_that_fails_leaves_the_one_before_it(tmp_path):
    path = shared(tmp_path)
    trainer, module = fit(SHARD)
    trainer.save_checkpoint(path / "a")
    before = read_checkpoint(path / "a")
    dist.barrier()
    module.hparams["odd"] = object()
    with pytest.raises(RuntimeError, match=r"cannot hold hyper_parameters\.odd.*save_hyperparameters\(ignore"):
        trainer.save_checkpoint(path / "a")
    del module.hparams["odd"]
    torch.testing.assert_close(read_checkpoint(path / "a")["state_dict"], before["state_dict"], **EXACT)


WIDTH, LIMIT_BYTES = 200, 100_000


@pytest.mark.world_size(2)
def test_a_save_in_the_background_that_fails_ends_the_job(tmp_path):
    """Rank 1 cannot write files as large as its shards; the checkpoint that was to be replaced stays."""
    path = shared(tmp_path)
    saves = [ModelCheckpoint(path, filename="{step}", every_n_train_steps=2), OnExceptionCheckpoint(path / "failed")]

    class Limits(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                trainer.strategy._checkpoints.wait()
            if batch_idx == 2 and trainer.global_rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))

    trainer = build_trainer(SHARD, callbacks=[Limits(), *saves], enable_checkpointing=True)
    trainer.strategy.checkpoint_io = AsyncCheckpointIO()
    samples = rank_loader(make_samples(80, WIDTH), 8, dist.get_rank(), 2)
    try:
        with pytest.raises((OSError, RuntimeError), match=r"could not save the checkpoint .*step=4\.ckpt"):
            trainer.fit(seeded(lambda: Regression(WIDTH)), samples)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert read_checkpoint(path / "step=2.ckpt")["global_step"] == 2
    assert [each.name for each in path.glob("*.ckpt")] == ["step=2.ckpt"]


# ---- what is not storable --------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class WithOdd(Regression):
    def __init__(self, colour=Colour.RED, loss=None):
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_are_refused_before_training(tmp_path):
    module = seeded(WithOdd)
    checkpoint = ModelCheckpoint(tmp_path)
    with pytest.raises(TypeError, match=r"hyper_parameters\.colour, of type .*Colour: nothing is pickled.*ignore="):
        fit({}, module, callbacks=[checkpoint], enable_checkpointing=True)
    assert module.losses == []
    fit({}, module)  # without checkpoints they are nobody's business


class Remembers(Callback):
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def test_states_of_callbacks(tmp_path):
    state = {1: torch.arange(3), "a": {"b": (1, 2.5, None), "c": {4}}, "best": torch.tensor(float("inf"))}
    trainer, _ = fit({}, callbacks=[Remembers(state)])
    trainer.save_checkpoint(tmp_path / "a")
    callback = Remembers({})
    fit({}, callbacks=[callback], ckpt_path=tmp_path / "a")
    assert callback.loaded.keys() == state.keys()
    assert callback.loaded[1].tolist() == [0, 1, 2]
    assert callback.loaded["a"] == state["a"]
    trainer, _ = fit({}, callbacks=[Remembers({"f": print})])
    with pytest.raises(TypeError, match=r"cannot hold callbacks.*Remembers.*\.f, of type .*Let it|let it"):
        trainer.save_checkpoint(tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "plugin", "error", "match"),
    [
        ({"dirpath": "memory://a"}, None, ValueError, "no path of a file system"),
        ({"dirpath": "/proc/none"}, None, OSError, "nothing can be written to /proc"),
        ({"save_last": "link"}, AsyncCheckpointIO(), ValueError, r"save_last=True"),
    ],
)
def test_callbacks_whose_checkpoints_could_not_be_saved(options, plugin, error, match, tmp_path):
    module = seeded(Regression)
    checkpoint = ModelCheckpoint(**{"dirpath": tmp_path, **options})
    strategy = D9DStrategy()
    strategy.checkpoint_io = plugin
    trainer = plain_trainer(strategy=strategy, callbacks=[checkpoint], enable_checkpointing=True)
    with pytest.raises(error, match=match):
        trainer.fit(module, loader())
    assert module.losses == []


class OwnIO(TorchCheckpointIO):
    pass


def test_other_plugins_are_refused_when_the_trainer_is_built():
    with pytest.raises(ValueError, match=r"OwnIO would not be called.*consolidate"):
        plain_trainer(strategy=D9DStrategy(), plugins=[OwnIO()])
    plain_trainer(strategy=D9DStrategy(), plugins=[TorchCheckpointIO()])


def test_storage_options_are_refused(tmp_path):
    trainer, _ = fit({})
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "a", storage_options={})


# ---- other parameters ------------------------------------------------------------------------------------------------


class Extended(Regression):
    def __init__(self, learning_rate=1e-2):
        super().__init__(learning_rate=learning_rate)
        self.extra = nn.Parameter(torch.zeros(2))
        self.strict_loading = False


class ByPosition(Extended):
    """Has as many parameters as it had, one of them under another name."""

    def __init__(self):
        super().__init__()
        del self.head.bias, self.extra
        self.head.bias = None
        self.bias = nn.Parameter(torch.zeros(1))

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["bias"] = checkpoint["state_dict"].pop("head.bias")
        for state in checkpoint["optimizer_states"]:
            del state["parameter_names"]


@pytest.mark.world_size(2)
def test_parameters_that_are_new_or_gone_are_named(tmp_path):
    path = shared(tmp_path)
    trainer, _ = fit(SHARD)
    trainer.save_checkpoint(path / "a")
    with pytest.raises(ValueError, match=r"(?s)extra is in group 0 of the module's, and not there.*parameter_names"):
        fit(SHARD, seeded(Extended), ckpt_path=path / "a")
    trainer, _ = fit(SHARD, seeded(Extended))
    trainer.save_checkpoint(path / "b")
    module = seeded(Regression)
    module.strict_loading = False
    with pytest.raises(ValueError, match=r"extra is in group 0 there"):
        fit(SHARD, module, ckpt_path=path / "b")


class Reordered(Regression):
    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.AdamW(parameters[::-1] if self.hparams.learning_rate < 1e-2 else parameters, lr=1e-2)


def test_parameters_in_another_order_keep_their_states(tmp_path):
    """By position their shapes would differ, or worse, not."""
    trainer, _ = fit({}, seeded(Reordered))
    trainer.save_checkpoint(tmp_path / "a")
    resumed, _ = fit({}, seeded(lambda: Reordered(learning_rate=1e-3)), ckpt_path=tmp_path / "a", max_epochs=1)
    before, after = trainer.optimizers[0].state, resumed.optimizers[0].state
    for (name, one), (other_name, other) in zip(
        trainer.lightning_module.named_parameters(), resumed.lightning_module.named_parameters(), strict=True
    ):
        assert name == other_name
        torch.testing.assert_close(before[one], after[other], **EXACT)


@pytest.mark.world_size(2)
def test_by_position_if_asked(tmp_path):
    path = shared(tmp_path)
    trainer, _ = fit(REPLICATE)
    trainer.save_checkpoint(path / "a")
    _, module = fit(REPLICATE, seeded(ByPosition), ckpt_path=path / "a", max_epochs=1)
    assert full_state(module)["bias"].equal(read_checkpoint(path / "a")["state_dict"]["head.bias"])


def test_the_learning_rate_that_counts_is_told(tmp_path, caplog):
    trainer, _ = fit({})
    trainer.save_checkpoint(tmp_path / "a")
    with caplog.at_level("INFO"):
        resumed, _ = fit({}, seeded(lambda: Regression(learning_rate=1.0)), ckpt_path=tmp_path / "a")
    assert resumed.optimizers[0].param_groups[0]["lr"] == 1e-2
    assert any("group 0: lr is 0.01 as in the checkpoint, not 1" in message for message in caplog.messages)


class TwoOptimizers(Regression):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.blocks.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adagrad(self.head.parameters(), lr=0.1),
        ]


@pytest.mark.world_size(2)
def test_another_number_of_optimizers(tmp_path):
    path = shared(tmp_path)
    trainer, _ = fit(SHARD, seeded(TwoOptimizers))
    trainer.save_checkpoint(path / "a")
    fit(SHARD, seeded(TwoOptimizers), ckpt_path=path / "a")
    with pytest.raises(ValueError, match=r"states of 2 optimizers, and configure_optimizers\(\) makes 1"):
        fit(SHARD, seeded(Regression), ckpt_path=path / "a")


# ---- tensors that stay in the files ----------------------------------------------------------------------------------


class Watching(Regression):
    """Sees a mapping; changes one tensor, and adds and removes others."""

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        assert isinstance(state, SavedTensors)
        self.unread = len(state.unread())
        state["head.bias"].fill_(7.0)
        assert len(state.unread()) == self.unread - 1
        assert dict(state).keys() == (state | {}).keys() == state.copy().keys() == set(state)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [SHARD, REPLICATE], ids=str)
def test_hooks_see_a_state_dict(mesh, tmp_path):
    path = shared(tmp_path)
    trainer, trained = fit(mesh)
    trainer.save_checkpoint(path / "a")
    _, module = fit(mesh, seeded(Watching, seed=1), ckpt_path=path / "a", max_epochs=1)
    assert module.unread == len(trained.state_dict())
    expected = full_state(trained) | {"head.bias": torch.full((1,), 7.0, dtype=torch.float64)}
    torch.testing.assert_close(full_state(module), expected, **EXACT)


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.world_size(2)
def test_both_ways_of_saving_write_the_same_bytes(tmp_path):
    path = shared(tmp_path)
    for name, plugin in (("foreground", None), ("background", AsyncCheckpointIO())):
        trainer = build_trainer(SHARD, callbacks=[Saves(path / name)])
        trainer.strategy.checkpoint_io = plugin
        module = seeded(Regression)
        torch.manual_seed(0)
        trainer.fit(module, loader())
        trainer.save_checkpoint(path / f"{name}_end")  # nobody would wait for it
        assert read_checkpoint(path / f"{name}_end")["global_step"] == 2
    dist.barrier()
    records = [CommitRecord.read(path / name).files for name in ("foreground", "background")]
    assert records[0] == records[1]
    assert all(isinstance(digest, FileDigest) for digest in records[0].values())
