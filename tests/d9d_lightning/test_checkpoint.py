"""Checkpoints are folders, or files of plain Lightning: saved on one mesh, resumed on any other."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from d9d_lightning import read_checkpoint
from tests.d9d_lightning.support import (
    Regression,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
BATCH = 8
MESHES = {
    1: [{}],
    2: [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}],
    4: [{"data_parallel_replicate": 2, "data_parallel_shard": 2}],
}
CASES = [pytest.param(mesh, id=str(mesh)) for meshes in MESHES.values() for mesh in meshes]


def build_loader(rank, world_size):
    return rank_loader(make_samples(4 * BATCH), BATCH, rank, world_size)


def train_on(mesh, num_epochs, ckpt_path=None):
    trainer = build_trainer(mesh, max_epochs=num_epochs)
    module = seeded(Regression)
    trainer.fit(module, build_loader(dist.get_rank(), dist.get_world_size()), ckpt_path=ckpt_path)
    return trainer, module


def plain_reference(num_epochs):
    module = seeded(Regression)
    plain_trainer(max_epochs=num_epochs).fit(module, build_loader(0, 1))
    return module


def check_save_and_resume(mesh, path):
    """Save after one epoch, resume here for another one, and compare with two epochs of plain Lightning."""
    trainer, _ = train_on(mesh, 1)
    trainer.save_checkpoint(path)
    state = read_checkpoint(path)["state_dict"]
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    resumed, module = train_on(mesh, 2, path)
    assert resumed.global_step == 8
    torch.testing.assert_close(full_state(module), dict(plain_reference(2).state_dict()), **EXACT)


@pytest.mark.world_size(1)
def test_save_and_resume_on_one_rank(tmp_path):
    check_save_and_resume({}, tmp_path / "a.ckpt")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_save_and_resume_on_two_ranks(mesh, tmp_path):
    check_save_and_resume(mesh, tmp_path / "a.ckpt")


@pytest.mark.world_size(4)
def test_save_and_resume_on_four_ranks(tmp_path):
    check_save_and_resume(MESHES[4][0], tmp_path / "a.ckpt")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Where the tests below leave a checkpoint of each mesh for the next ones, and what plain Lightning saved."""
    directory = tmp_path_factory.mktemp("checkpoints")
    module = seeded(Regression)
    trainer = plain_trainer()
    trainer.fit(module, build_loader(0, 1))
    trainer.save_checkpoint(directory / "plain.ckpt")
    return directory


@pytest.mark.world_size(4)
def test_a_hybrid_mesh_saves(checkpoints):
    trainer, _ = train_on(MESHES[4][0], 1)
    trainer.save_checkpoint(checkpoints / "hybrid.ckpt")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_two_ranks_resume(mesh, name, checkpoints):
    _, module = train_on(mesh, 2, checkpoints / f"{name}.ckpt")
    torch.testing.assert_close(full_state(module), dict(plain_reference(2).state_dict()), **EXACT)


@pytest.mark.world_size(4)
def test_a_hybrid_mesh_resumes_what_plain_lightning_saved(checkpoints):
    _, module = train_on(MESHES[4][0], 2, checkpoints / "plain.ckpt")
    torch.testing.assert_close(full_state(module), dict(plain_reference(2).state_dict()), **EXACT)


def test_plain_lightning_resumes_what_a_hybrid_mesh_saved(checkpoints):
    module = seeded(Regression)
    plain_trainer(max_epochs=2).fit(module, build_loader(0, 1), ckpt_path=checkpoints / "hybrid.ckpt")
    torch.testing.assert_close(dict(module.state_dict()), dict(plain_reference(2).state_dict()), **EXACT)
    loaded = Regression.load_from_checkpoint(checkpoints / "hybrid.ckpt")
    # `load_from_checkpoint` builds the module anew, in fp32.
    expected = {name: tensor.float() for name, tensor in plain_reference(1).state_dict().items()}
    torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)


class Validated(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    test_step = validation_step


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_model_checkpoint_keeps_the_best_and_test_loads_it(mesh, tmp_path):
    # Rank 0's directory counts, as in Lightning.
    checkpoint = ModelCheckpoint(tmp_path / str(dist.get_rank()), monitor="val_loss", save_top_k=1)
    trainer = build_trainer(mesh, max_epochs=3, enable_checkpointing=True, callbacks=[checkpoint])
    module = seeded(Validated)
    loader = build_loader(dist.get_rank(), 2)
    trainer.fit(module, loader, loader)
    best = checkpoint.best_model_score
    assert checkpoint.best_model_path.startswith(str(tmp_path / "0"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    [result] = trainer.test(module, loader, ckpt_path="best")
    assert result["val_loss"] == pytest.approx(best.item(), rel=1e-6)


@pytest.mark.world_size(2)
def test_a_failed_write_is_an_error_on_all_ranks(tmp_path):
    trainer, _ = train_on({"data_parallel_shard": 2}, 1)
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match=r"could not save the checkpoint .*taken/a\.ckpt"):
        trainer.save_checkpoint(tmp_path / "taken" / "a.ckpt")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strict", [True, False])
def test_mismatches_are_reported_as_by_torch(strict, tmp_path):
    trainer, module = train_on({"data_parallel_shard": 2}, 1)
    state = {name: tensor for name, tensor in full_state(module).items() if name != "head.bias"}
    module.strict_loading = strict
    checkpoint = {"state_dict": state}
    if strict:
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
            trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    else:
        trainer.strategy.load_model_state_dict(checkpoint, strict=False)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        trainer.strategy.load_model_state_dict({"state_dict": state | {"head.weight": torch.zeros(2, 2)}}, strict=False)


class Hooked(Regression):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = [1, 2]

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["mine"]
        checkpoint["state_dict"] = {name: tensor * 0 for name, tensor in checkpoint["state_dict"].items()}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_hooks_edit_checkpoints(mesh, tmp_path):
    trainer = build_trainer(mesh)
    trainer.fit(seeded(Hooked), build_loader(dist.get_rank(), 2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = seeded(Hooked)
    build_trainer(mesh).fit(module, build_loader(dist.get_rank(), 2), ckpt_path=tmp_path / "a.ckpt")
    assert module.loaded == [1, 2]
    assert all(not tensor.any() for tensor in full_state(module).values())
