"""D3: disks that are full, at many places of a file. D16: slow storage, and ranks that see it late."""

import errno
import logging
import resource
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d.checkpoint import CheckpointFolder, CheckpointSaver, find_checkpoint, load_state
from d9d.core.participants import Participants
from d9d.loop.event.catalogue.common import EventStepContext
from d9d.loop.event.catalogue.train import EVENT_TRAIN_STEP_PRE
from tests.d9d.loop.run.regression_job import Job
from tests.faults.training import TOTAL_STEPS, logged, sharded_job

LOGGER = logging.getLogger("test")
LIMIT_S = 10.0
ROWS = 4001


def participants() -> Participants:
    world = dist.group.WORLD
    assert world is not None
    return Participants([world])


def state(value: float) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(ROWS * 8.0).view(ROWS, 8) + value
    return {"large": distribute_tensor(full, mesh, [Shard(0)]), "small": distribute_tensor(full[:3], mesh, [Shard(0)])}


def check_newest(path: Path, step: int) -> None:
    """Load the newest checkpoint, whose values are the step."""
    found = find_checkpoint(CheckpointFolder(path, LOGGER), participants(), "raise", LOGGER)
    assert found is not None
    assert found.step == step
    wanted = state(-1.0)
    load_state(found.path, wanted, dist.group.WORLD)
    for name, expected in state(step).items():
        assert torch.equal(wanted[name].to_local(), expected.to_local())


@contextmanager
def files_no_larger_than(num_bytes: int) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_places", [pytest.param(5), pytest.param(50, marks=pytest.mark.faults)])
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.world_size(2, timeout_s=300)
def test_a_file_that_cannot_grow(tmp_path: Path, num_places: int, in_background: bool):
    """D3. The system refuses to write further, as it does when a disk is full, at places all over the file of rank 1."""
    CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants()).save(state(1), 1)
    own = Participants([dist.new_group(backend="gloo")]) if in_background else None
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants(), own)
    full_bytes = (tmp_path / "save-1" / "__1_0.distcp").stat().st_size
    for place in range(num_places):
        limit = full_bytes * place // num_places if dist.get_rank() == 1 else 1 << 40
        started_s = time.monotonic()
        with (
            files_no_larger_than(limit),
            pytest.raises(
                OSError, match=r"could not save the checkpoint .*save-2: on rank 1 of 2: File too large"
            ) as full,
        ):
            save_and_wait(saver, 2)
        assert full.value.errno == errno.EFBIG
        assert time.monotonic() - started_s < LIMIT_S
    check_newest(tmp_path, 1)
    save_and_wait(saver, 3)  # there is room again
    check_newest(tmp_path, 3)


def save_and_wait(saver: CheckpointSaver, step: int) -> None:
    saver.save(state(step), step)
    saver.wait()


@pytest.mark.world_size(2)
def test_a_slow_commit(tmp_path: Path):
    """D16: all ranks come back after the commit, not before."""

    def slow(point: str) -> None:
        if point == "before_commit":
            time.sleep(2.0)

    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER, slow), participants())
    saver.save(state(1), 1)
    assert (tmp_path / "save-1" / "commit.json").exists()
    check_newest(tmp_path, 1)


@pytest.mark.world_size(2)
def test_a_rank_that_sees_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """D16: caches of network file systems may know nothing of new names yet. What is there is for rank 0 to say."""
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants())
    saver.save(state(1), 1)
    if dist.get_rank() == 1:
        for question in ("exists", "is_dir", "is_file"):
            monkeypatch.setattr(Path, question, lambda self, *args, **kwargs: False)
        monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    check_newest(tmp_path, 1)
    saver.save(state(2), 2)
    check_newest(tmp_path, 2)


class FullDisk:
    """Leads what rank 1 writes of some checkpoints to a device that never has room."""

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder, self._steps = folder, steps

    def __call__(self, point: str) -> None:
        if point == "before_write" and dist.get_rank() == 1:
            (partial,) = self._folder.glob("save-*.partial")
            if int(partial.stem.removeprefix("save-")) in self._steps:
                (partial / "__1_0.distcp").symlink_to("/dev/full")


def job_with_full_disk(path: Path, options: dict[str, Any], steps: Collection[int]) -> tuple[Job, CheckpointFolder]:
    job = sharded_job(path, options)
    checkpointer = job.trainer._state.checkpointer
    checkpointer._saver._probe = FullDisk(checkpointer.save_dir, steps)
    return job, CheckpointFolder(checkpointer.save_dir, LOGGER)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.world_size(2)
def test_training_goes_on_without_checkpoints(tmp_path: Path, in_background: bool):
    """D3: by config. There is a checkpoint to go back to all the time, and new ones as soon as there is room."""
    options = {"on_save_failure": "continue", "async_save": in_background}
    job, folder = job_with_full_disk(tmp_path, options, {4, 5})
    complete: dict[int, list[int]] = {}

    def look(context: EventStepContext) -> None:
        complete[context.schedule.current_step] = [saved.step for saved in folder.complete()]
        if not in_background and dist.get_rank() == 0:  # which removes what was written
            assert list(folder.path.glob("*.partial")) == []

    job.trainer._state.event_bus.subscribe(EVENT_TRAIN_STEP_PRE, look)
    job.trainer.train()
    # Where saves are in the background, that of the last step may be on its way.
    assert complete[4] == complete[5] == [2, 3]
    if not in_background:
        assert (complete[6], complete[7]) == ([3, 6], [6, 7])
    dist.barrier()
    assert sorted(path.name for path in folder.path.glob("save-*")) == [
        f"save-{TOTAL_STEPS - 1}",
        f"save-{TOTAL_STEPS}",
    ]
    assert {step for step, name in logged(tmp_path) if name == "loss"} == set(range(1, TOTAL_STEPS + 1))


@pytest.mark.parametrize(("on_failure", "step"), [("raise", 4), ("continue", TOTAL_STEPS)])
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.world_size(2)
def test_a_full_disk_ends_the_job(tmp_path: Path, on_failure: str, step: int, in_background: bool):
    """D3: on all ranks, and for the last checkpoint whatever the config says."""
    options = {"on_save_failure": on_failure, "async_save": in_background}
    job, folder = job_with_full_disk(tmp_path, options, {step})
    with pytest.raises(OSError, match=rf"save-{step}: on rank 1 of 2: No space left on device") as full:
        job.trainer.train()
    assert full.value.errno == errno.ENOSPC
    dist.barrier()
    assert [saved.step for saved in folder.complete()] == [step - 2, step - 1]
