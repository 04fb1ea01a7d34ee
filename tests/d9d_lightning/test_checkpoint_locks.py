"""One fit at a time saves to a folder: another one is refused by name, and nothing is left of one that was killed."""

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from d9d_lightning import D9DStrategy
from d9d_lightning.checkpoints import store
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, plain_trainer, rank_loader, seeded

HOLDS_LOCK = """
import fcntl, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
file = (folder / ".lock").open("w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("the other one")
file.flush()
print("locked", flush=True)
time.sleep(600)
"""


class Measured(Regression):
    def test_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


def fit(folder, mesh=None, module=None, callbacks=(), **saving):
    options = {"callbacks": [ModelCheckpoint(folder, **saving), *callbacks], "enable_checkpointing": True}
    trainer = build_trainer(mesh, **options) if mesh else plain_trainer(strategy=D9DStrategy(), **options)
    rank, size = (dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)
    loader = rank_loader(make_samples(16), 8, rank, size)
    trainer.fit(module or seeded(Measured), loader)
    return trainer, loader


def is_locked(folder):
    with (folder / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Looks(Callback):
    def __init__(self, *folders):
        self.folders = folders
        self.seen = []

    def on_train_batch_end(self, *args):
        self.seen.append([is_locked(folder) for folder in self.folders])


def test_runs_one_after_the_other(tmp_path):
    folder, other = tmp_path / "saved", tmp_path / "other"
    looks = Looks(folder, other)
    # Two callbacks with one folder, by two names.
    (tmp_path / "link").symlink_to(folder)
    callbacks = [ModelCheckpoint(tmp_path / "link", every_n_train_steps=100), OnExceptionCheckpoint(other), looks]
    trainer, loader = fit(folder, callbacks=callbacks)
    assert looks.seen == [[True, True]] * 2
    trainer.test(seeded(Measured), loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(seeded(Measured), loader)
    fit(folder)
    assert not (folder / ".lock").exists()
    assert not other.exists()  # nothing was saved there


class OtherFit(threading.Thread):
    """A fit that begins, and keeps what goes wrong."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.store = store.CheckpointStore()
        self.error = None

    def run(self):
        try:
            self.store._lock(self.folder)
        except OSError as error:
            self.error = error


def test_a_fit_that_waits_for_one_that_saves_nothing(tmp_path):
    """As after a preemption before the first save: the one that ends has made the folder, and removes it."""
    folder = tmp_path / "below" / "saved"
    first, waits = OtherFit(folder), OtherFit(folder)
    first.run()
    waits.start()
    time.sleep(0.3)  # some tries
    first.store.end()
    waits.join()
    assert (first.error, waits.error) == (None, None)
    assert is_locked(folder)
    # An empty folder stays if the second took the lock before the first had removed it: each removes what it has made.
    waits.store.end()
    assert not (folder / ".lock").exists()


class FailsError(Exception):
    pass


class Fails(Measured):
    def training_step(self, batch, batch_idx):
        raise FailsError


def test_a_fit_that_has_failed_keeps_no_lock(tmp_path):
    with pytest.raises(FailsError):
        fit(tmp_path, module=seeded(Fails))
    fit(tmp_path)


@pytest.mark.world_size(2)
def test_another_job_is_refused_until_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_WAIT_S", 0.2)
    mesh = {"data_parallel_replicate": 2}
    paths = [str(tmp_path / "saved")]
    dist.broadcast_object_list(paths)
    process = None
    if dist.get_rank() == 0:
        process = subprocess.Popen([sys.executable, "-c", HOLDS_LOCK, paths[0]], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
    dist.barrier()
    with pytest.raises(
        OSError, match=r"another fit that saves checkpoints to .*saved is in progress, led by the other one"
    ):
        fit(paths[0], mesh)
    dist.barrier()
    if process is not None:
        process.kill()
        process.wait()
    dist.barrier()
    fit(paths[0], mesh)
    assert list(Path(paths[0]).glob("*.ckpt"))
