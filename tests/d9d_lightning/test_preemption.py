"""A fit that a signal ends has saved what it has done, and goes on from there."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import TensorDataset

from d9d.core import preemption
from d9d_lightning import D9DStrategy
from d9d_lightning.data import elastic_dataloader
from tests.d9d_lightning.support import (
    Regression,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

SHARD = {"data_parallel_shard": 2}
NUM_BATCHES = 8


def loader(*, batch_size=None):
    """8 steps of 4 samples over all ranks."""
    samples = TensorDataset(*make_samples(4 * NUM_BATCHES))
    return elastic_dataloader(samples, global_batch_size=4, batch_size=batch_size)


class SignalAt(Callback):
    """Sends a signal to one rank at the end of a batch, counted over all epochs."""

    def __init__(self, batch, signum=signal.SIGTERM, rank=0):
        self.batch, self.signum, self.rank = batch, signum, rank
        self.num_batches = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.num_batches += 1
        if self.num_batches == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)


class Validated(Regression):
    def __init__(self):
        super().__init__()
        self.validated_after = []

    def validation_step(self, batch, batch_idx):
        if not batch_idx:
            self.validated_after.append(self.global_step)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


@pytest.mark.world_size(2)
# The exchanges are before batches 0, 2, 6, 14, ...
@pytest.mark.parametrize(
    ("batch", "stop"), [(2, 2), (3, 6), (NUM_BATCHES - 1, 14)], ids=["early", "later", "next-epoch"]
)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_fit_resumes_bit_for_bit(tmp_path, batch, stop, signum, monkeypatch):
    monkeypatch.setattr(preemption, "_TARGET_S", 1e6)  # however slow the machine is
    options = {"max_epochs": 2, "enable_checkpointing": True}
    straight = seeded(Regression)
    build_trainer(SHARD, **options | {"enable_checkpointing": False}).fit(straight, loader())

    first = seeded(Regression)
    saver = ModelCheckpoint(tmp_path)
    trainer = build_trainer(SHARD, callbacks=[saver, SignalAt(batch, signum, rank=1)], **options)
    with pytest.raises(SIGTERMException) as ended:
        trainer.fit(first, loader())
    assert ended.value.code == 128 + signum
    assert len(first.losses) == trainer.global_step == stop
    assert (tmp_path / "last-preempted.ckpt").exists()

    second = seeded(Regression)
    build_trainer(SHARD, callbacks=[ModelCheckpoint(tmp_path)], **options).fit(second, loader(), ckpt_path="last")
    assert len(second.losses) == 2 * NUM_BATCHES - stop
    assert_same(full_state(second), full_state(straight))


@pytest.mark.world_size(2)
def test_a_stop_leaves_no_half_window(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_TARGET_S", 1e-9)  # exchanges before batches 0, 2, 3, 4, ...
    options = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    straight = seeded(Regression)
    build_trainer(SHARD, **options | {"enable_checkpointing": False}).fit(straight, loader(batch_size=1))
    first = seeded(Regression)
    trainer = build_trainer(SHARD, callbacks=[ModelCheckpoint(tmp_path), SignalAt(3)], **options)
    with pytest.raises(SIGTERMException):
        trainer.fit(first, loader(batch_size=1))
    # All know in the middle of the second window.
    assert (len(first.losses), trainer.global_step) == (4, 2)
    second = seeded(Regression)
    resumed = build_trainer(SHARD, callbacks=[ModelCheckpoint(tmp_path)], **options)
    resumed.fit(second, loader(batch_size=1), ckpt_path="last")
    assert_same(full_state(second), full_state(straight))


@pytest.mark.world_size(2)
def test_a_signal_in_validation_lets_it_end(tmp_path):
    class Signalled(Validated):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.global_step == 2 and batch_idx == 1 and self.trainer.global_rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    validation = rank_loader(make_samples(16), 4, dist.get_rank(), 2)
    options = {"val_check_interval": 2, "enable_checkpointing": True}
    first = seeded(Signalled)
    trainer = build_trainer(SHARD, callbacks=[ModelCheckpoint(tmp_path)], **options)
    with pytest.raises(SIGTERMException):
        trainer.fit(first, loader(), validation)
    assert (trainer.global_step, first.validated_after) == (2, [2])
    second = seeded(Validated)
    build_trainer(SHARD, callbacks=[ModelCheckpoint(tmp_path)], **options).fit(
        second, loader(), validation, ckpt_path="last"
    )
    assert second.validated_after == [4, 6, 8]


@pytest.mark.world_size(2)
def test_callbacks_that_save_on_exceptions_do_so_instead(tmp_path):
    trainer = build_trainer(
        SHARD,
        callbacks=[ModelCheckpoint(tmp_path), OnExceptionCheckpoint(tmp_path), SignalAt(2)],
        enable_checkpointing=True,
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(seeded(Regression), loader())
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["on_exception.ckpt"]


@pytest.mark.world_size(2)
def test_a_signal_in_the_last_batch_lets_the_fit_finish(tmp_path):
    trainer = build_trainer(
        SHARD, callbacks=[ModelCheckpoint(tmp_path), SignalAt(NUM_BATCHES)], enable_checkpointing=True
    )
    trainer.fit(seeded(Regression), loader())
    assert trainer.state.finished
    dist.barrier()
    assert not (tmp_path / "last-preempted.ckpt").exists()


@pytest.mark.world_size(2)
def test_nothing_is_saved_before_the_first_step(tmp_path):
    class AtStart(Callback):
        def on_train_start(self, trainer, module):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = build_trainer(SHARD, callbacks=[ModelCheckpoint(tmp_path), AtStart()], enable_checkpointing=True)
    with pytest.raises(SIGTERMException) as ended:
        trainer.fit(seeded(Regression), loader())
    assert ended.value.code == 143
    dist.barrier()
    assert not list(tmp_path.iterdir())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_no_rank_exits_before_the_logs_of_all_are_closed(tmp_path, slow_rank):
    class SlowLogger(CSVLogger):
        def finalize(self, status):
            if dist.get_rank() == slow_rank:
                time.sleep(1)
                (tmp_path / "closed").touch()

    trainer = build_trainer(SHARD, callbacks=[SignalAt(2)], logger=SlowLogger(tmp_path))
    with pytest.raises(SIGTERMException):
        trainer.fit(seeded(Regression), loader())
    assert (tmp_path / "closed").exists()


def test_one_process(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    straight = seeded(Regression)
    plain_trainer(strategy=D9DStrategy()).fit(straight, loader())
    first = seeded(Regression)
    callbacks = [ModelCheckpoint(tmp_path), SignalAt(3)]
    trainer = plain_trainer(strategy=D9DStrategy(), callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(SIGTERMException) as ended:
        trainer.fit(first, loader())
    assert ended.value.code == 143
    assert trainer.global_step == 3
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    assert signal.getsignal(signal.SIGTERM) == before
    second = seeded(Regression)
    resumed = plain_trainer(strategy=D9DStrategy(), callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    resumed.fit(second, loader(), ckpt_path="last")
    assert_same(full_state(second), full_state(straight))
