"""A rank that raises neither leaves the others waiting, nor waits for them."""

import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from d9d_lightning import read_checkpoint
from d9d_lightning.jobs import failures
from tests.d9d_lightning.support import Regression, build_trainer, full_state, make_samples, rank_loader, seeded


class BoomError(ValueError):
    pass


class Failing(Regression):
    """Raises in the third step on some ranks."""

    error = BoomError

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank in self.ranks:
            raise self.error(f"boom on {self.trainer.global_rank}")
        return super().training_step(batch, batch_idx)


class Interrupted(Failing):
    error = KeyboardInterrupt


def fit(module, mesh, directory, monkeypatch):
    monkeypatch.setattr(failures, "LIMIT_S", 0.5)
    callbacks = [
        OnExceptionCheckpoint(directory / "a"),
        ModelCheckpoint(directory / "b", save_on_exception=True, every_n_train_steps=100, filename="at"),
    ]
    trainer = build_trainer(mesh, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, rank_loader(make_samples(16), 4, dist.get_rank(), 2))


MESHES = [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_all_ranks_run_into_is_saved(mesh, tmp_path, monkeypatch):
    module = seeded(lambda: Failing((0, 1)))
    with pytest.raises(BoomError):
        fit(module, mesh, tmp_path, monkeypatch)
    state = full_state(module)
    for path in ("a/on_exception.ckpt", "b/at.ckpt"):
        torch.testing.assert_close(read_checkpoint(tmp_path / path)["state_dict"], state)
    # The job goes on.
    build_trainer(mesh).fit(seeded(Regression), rank_loader(make_samples(8), 4, dist.get_rank(), 2))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_that_raises_ends_the_others(mesh, bad_rank, tmp_path, monkeypatch):
    start_s = time.monotonic()
    with pytest.raises(RuntimeError if dist.get_rank() != bad_rank else BoomError) as caught:
        fit(seeded(lambda: Failing((bad_rank,))), mesh, tmp_path, monkeypatch)
    assert time.monotonic() - start_s < 10
    if dist.get_rank() != bad_rank:
        (note,) = caught.value.__notes__
        assert (
            f"because rank {bad_rank} failed in step 3, a batch of the train loop: BoomError: boom on {bad_rank}"
            in note
        )
    assert not list(tmp_path.rglob("*.ckpt"))
    with pytest.raises(RuntimeError, match="Start the job again"):
        build_trainer(mesh).fit(seeded(Regression), rank_loader(make_samples(8), 4, dist.get_rank(), 2))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=str)
def test_interruption_by_hand(ranks, tmp_path, monkeypatch):
    is_bad = dist.get_rank() in ranks
    with pytest.raises(SystemExit if is_bad else RuntimeError):
        fit(seeded(lambda: Interrupted(ranks)), MESHES[1], tmp_path, monkeypatch)
    assert (tmp_path / "a/on_exception.ckpt").exists() == (ranks == (0, 1))
