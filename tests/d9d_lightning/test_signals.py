"""Signals end all ranks at the same batch."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from d9d.core import preemption
from d9d_lightning.jobs.signals import AgreedSignals
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded

SHARD = {"data_parallel_shard": 2}


def loader(num_samples=256):
    return rank_loader(make_samples(num_samples), 4, dist.get_rank(), 2)


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Signal(Callback):
    """Does something to one rank before a batch."""

    def __init__(self, rank, batch, act):
        self.rank, self.batch, self.act = rank, batch, act

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.global_rank, batch_idx) == (self.rank, self.batch):
            self.act(trainer)


def set_flag(trainer):
    trainer._signal_connector.received_sigterm = True


def send_sigterm(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("act", [set_flag, send_sigterm])
def test_a_signal_to_one_rank_ends_all_in_the_same_batch(rank, act, monkeypatch):
    monkeypatch.setattr(preemption, "_TARGET_S", 1e6)  # however slow the machine is
    before = signal.getsignal(signal.SIGTERM)
    module = seeded(Regression)
    trainer = build_trainer(SHARD, callbacks=[Signal(rank, 5, act)])
    with pytest.raises(SIGTERMException):
        trainer.fit(module, loader())
    steps = of_all_ranks(len(module.losses))
    # The exchanges are before batches 0, 2, 6, 14, ..., while batches are fast.
    assert steps[0] == steps[1] == 6
    assert trainer.received_sigterm or trainer.global_rank != rank
    assert type(trainer._signal_connector) is _SignalConnector
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.world_size(2)
def test_training_without_a_signal_exchanges_seldom(monkeypatch):
    monkeypatch.setattr(preemption, "_TARGET_S", 1e6)  # however slow the machine is
    trainer = build_trainer(SHARD)
    calls = []
    real = dist.all_reduce

    def count(tensor, *args, **kwargs):
        if tensor.shape == (3,) and tensor.dtype == torch.float32:
            calls.append(trainer.fit_loop.batch_idx)
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", count)
    trainer.fit(seeded(Regression), loader())
    assert [batch + 1 for batch in calls] == [0, 2, 6, 14, 30, 62]  # of 64 batches


@pytest.mark.world_size(2)
def test_slow_batches_are_looked_at_each_time(monkeypatch):
    monkeypatch.setattr(preemption, "_TARGET_S", 1e-4)  # no batch is faster
    module = seeded(Regression)
    with pytest.raises(SIGTERMException):
        build_trainer(SHARD, callbacks=[Signal(1, 4, set_flag)]).fit(module, loader())
    assert of_all_ranks(len(module.losses)) == [5, 5]


@pytest.mark.world_size(2)
def test_requeue_state_is_saved_in_the_same_batch(monkeypatch):
    monkeypatch.setattr(preemption, "_TARGET_S", 1e6)  # however slow the machine is
    saved = []
    module = seeded(Regression)
    monkeypatch.setattr(
        _SignalConnector, "_slurm_sigusr_handler_fn", lambda self, signum, _: saved.append((signum, len(module.losses)))
    )

    def requeue(trainer):
        trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)

    build_trainer(SHARD, callbacks=[Signal(1, 5, requeue)]).fit(module, loader())
    assert of_all_ranks(saved) == [[(signal.SIGUSR1, 6)]] * 2


@pytest.mark.world_size(2)
def test_evaluation_ends_where_the_signal_is():
    class Validated(Regression):
        def validation_step(self, batch, batch_idx):
            self.num_validated = batch_idx + 1
            if batch_idx == 3:
                assert isinstance(self.trainer._signal_connector, AgreedSignals)
                self.trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)

    module = seeded(Validated)
    with pytest.raises(SIGTERMException) as ended:
        build_trainer(SHARD).validate(module, loader())
    assert ended.value.code == 128 + signal.SIGTERM
    assert module.num_validated == 4
