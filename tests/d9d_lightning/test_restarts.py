"""Fits that torchrun starts again: they resume, and end where they get no further."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from d9d_lightning import D9DStrategy
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, plain_trainer, rank_loader, seeded

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0


class FailsError(Exception):
    pass


class Fails(Regression):
    """On all ranks, after a step."""

    def __init__(self, num_steps):
        super().__init__()
        self.num_steps = num_steps

    def training_step(self, batch, batch_idx):
        if self.global_step == self.num_steps:
            raise FailsError
        return super().training_step(batch, batch_idx)


def attempt(number, folder, monkeypatch, *, num_steps=3, ckpt_path="last", limit=1):
    for name, value in (("RUN_ID", "job"), ("RESTART_COUNT", str(number)), ("MAX_RESTARTS", "9")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    trainer = build_trainer(
        {"data_parallel_replicate": 2},
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)],
        enable_checkpointing=True,
        strategy_options={"max_restarts_without_progress": limit},
    )
    loader = rank_loader(make_samples(48), 4, dist.get_rank(), 2)
    with pytest.raises(FailsError):
        trainer.fit(seeded(lambda: Fails(num_steps)), loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.world_size(2)
def test_a_job_that_gets_no_further_ends(tmp_path, monkeypatch):
    attempt(0, tmp_path, monkeypatch)  # leaves step 2
    attempt(1, tmp_path, monkeypatch)  # resumes from it: further than the first one
    attempt(2, tmp_path, monkeypatch)
    with pytest.raises(
        RuntimeError, match=r"restarted 2 times in a row without a newer checkpoint .* of step 2"
    ) as error:
        attempt(3, tmp_path, monkeypatch)
    assert "D9DStrategy(max_restarts_without_progress=...), now 1" in str(error.value)
    # Started by hand, it has all its restarts again, and gets further this time.
    attempt(0, tmp_path, monkeypatch, num_steps=5)
    attempt(1, tmp_path, monkeypatch, num_steps=5)


@pytest.mark.world_size(2)
def test_a_restart_that_does_not_resume_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(logging.getLogger("d9d_lightning.checkpoints.restarts"), "warning", told.append)
    attempt(0, tmp_path, monkeypatch, ckpt_path=None)
    assert not told
    attempt(1, tmp_path, monkeypatch, ckpt_path=None)
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all("call fit(ckpt_path='last')" in text for text in told)


@pytest.mark.world_size(2)
def test_a_fit_that_is_through_is_not_counted_again(tmp_path, monkeypatch):
    """A script fits twice. Restarts repeat the first fit, which has nothing left to do, while the second one gets further."""
    for number in range(3):
        for name, value in (("RUN_ID", "job"), ("RESTART_COUNT", str(number)), ("MAX_RESTARTS", "9")):
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        trainer = build_trainer(
            {"data_parallel_replicate": 2},
            callbacks=[ModelCheckpoint(tmp_path / "first", save_last=True)],
            enable_checkpointing=True,
            strategy_options={"max_restarts_without_progress": 0},
        )
        trainer.fit(seeded(Regression), rank_loader(make_samples(8), 4, dist.get_rank(), 2), ckpt_path="last")
        assert trainer.global_step == 2
        attempt(number, tmp_path / "second", monkeypatch, num_steps=3 + 2 * number, limit=0)
    attempt(3, tmp_path / "second", monkeypatch, num_steps=7, limit=0)  # resumes from step 6, the first to do so
    with pytest.raises(RuntimeError, match=r"restarted 1 times in a row .* of step 6"):
        attempt(4, tmp_path / "second", monkeypatch, num_steps=7, limit=0)


@pytest.mark.world_size(2)
def test_a_malformed_environment_is_said_by_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "two" if dist.get_rank() == 0 else "0")
    trainer = build_trainer(
        {"data_parallel_replicate": 2}, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True
    )
    with pytest.raises(ValueError, match=r"on rank 0 of 2: .*TORCHELASTIC_RESTART_COUNT='two'"):
        trainer.fit(seeded(Regression), rank_loader(make_samples(8), 4, dist.get_rank(), 2))


def test_nothing_is_written_where_nobody_restarts(tmp_path):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=100)
    trainer = plain_trainer(strategy=D9DStrategy(), callbacks=[saving], enable_checkpointing=True, max_steps=1)
    trainer.fit(seeded(Regression), rank_loader(make_samples(8), 4, 0, 1))
    assert not (tmp_path / "restarts.json").exists()


def test_a_malformed_limit():
    with pytest.raises(ValueError, match=r"max_restarts_without_progress \(-1\) must be a whole number of at least 0"):
        plain_trainer(strategy=D9DStrategy(max_restarts_without_progress=-1))


SCRIPT = """
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(f"steps-{self.global_rank}", "a") as file:
            file.write(f"{attempt}:{self.global_step} ")
        if attempt == "0" and self.global_rank == 1 and self.global_step == 3:
            os._exit(1)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = L.Trainer(
    strategy=D9DStrategy(), accelerator="cpu", devices=2, max_steps=5, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint("saved", every_n_train_steps=2, save_last=True)],
)
data = DataLoader(TensorDataset(torch.arange(96.0).view(24, 4) / 96), batch_size=2)
trainer.fit(Module(), data, ckpt_path="last")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout_s(LIMIT_S)
def test_torchrun_restarts_a_fit_that_resumes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = subprocess.run(
        [*torchrun, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    steps = (tmp_path / "steps-1").read_text().split()
    assert steps == ["0:0", "0:1", "0:2", "0:3", "1:2", "1:3", "1:4"]
