"""Checkpoints of the native loop: which folder counts, which is the newest, and that a run goes on from it."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.loop.component.checkpointer import StateCheckpointer
from d9d.loop.component.garbage_collector import ManualGarbageCollector
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.tracked_modules import TrackedModules, everything, only_trainable
from d9d.loop.config import CheckpointingConfig, GarbageCollectionConfig, JobScheduleConfig
from d9d.module.parallelism.api import parallelize_hsdp
from tests.harness.parity import assert_close_tree, named_full_parameters

TOTAL_STEPS = 100


class Stream:
    total_steps = TOTAL_STEPS


class State(Stateful):
    """A module and the number of steps."""

    def __init__(self, modules: TrackedModules, schedule: JobSchedule) -> None:
        self.modules, self.schedule = modules, schedule

    def state_dict(self) -> dict[str, Any]:
        return {"modules": self.modules.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.modules.load_state_dict(state_dict["modules"])
        self.schedule.load_state_dict(state_dict["schedule"])


class Job:
    """What a training run has, as far as checkpoints go. Weights after step n are all n."""

    def __init__(
        self,
        folder: Path,
        context: DistributedContext,
        *,
        every: int = 1,
        keep: int | None = None,
        timeout_s: float = 60.0,
        best: dict[str, Any] | None = None,
        value_at: Callable[[int], float | None] = lambda step: None,
    ) -> None:
        self.module = nn.Linear(3, 5)
        if context.is_distributed:
            parallelize_hsdp(self.module, context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"])
        self.schedule = JobSchedule(JobScheduleConfig(), Stream())
        gc = ManualGarbageCollector(context, GarbageCollectionConfig(period_steps="disable"), self.schedule)
        config = CheckpointingConfig(
            save_dir=folder, period_steps=every, num_to_keep=keep, on_best=best, timeout=timeout_s
        )
        self.checkpointer = StateCheckpointer(
            context, self.schedule, config, gc, "run", None, lambda name: value_at(self.schedule.current_step)
        )
        self.state = State(TrackedModules(context, [self.module], everything), self.schedule)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.schedule.step()
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.fill_(float(self.schedule.current_step))
            self.checkpointer.checkpoint_if_needed(self.state)

    def resume(self) -> int:
        """Load, check that weights and position agree, and return the position."""
        self.checkpointer.load_last_checkpoint(self.state)
        step = self.schedule.current_step
        if step:
            assert all(value.eq(step).all() for value in named_full_parameters(self.module).values())
        return step


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").iterdir())


def local() -> DistributedContext:
    return DeviceMeshParameters().build()


def test_resume_on_one_process(tmp_path: Path):
    Job(tmp_path, local(), every=2).train(5)
    assert saved_steps(tmp_path) == ["save-2", "save-4"]
    job = Job(tmp_path, local(), every=2)
    assert job.resume() == 4
    job.train(2)
    assert saved_steps(tmp_path) == ["save-2", "save-4", "save-6"]


def test_nothing_to_resume(tmp_path: Path):
    assert Job(tmp_path, local()).resume() == 0
    (tmp_path / "run").mkdir()
    assert Job(tmp_path, local()).resume() == 0


def test_folders_that_are_no_checkpoints(tmp_path: Path):
    Job(tmp_path, local()).train(3)
    run = tmp_path / "run"
    complete = run / "save-3"
    for name in ("save-41.tmp", "save-42.partial", "save-", "save-4x", "xsave-50", "save-٤٤", "save--5"):
        (run / name).mkdir()
        (run / name / ".metadata").write_bytes((complete / ".metadata").read_bytes())
    (run / "save-60").mkdir()  # written half: the metadata comes last
    (run / "save-60" / "__0_0.distcp").write_bytes(b"")
    (run / "save-61").write_text("a file")
    (run / "save-62").symlink_to(complete)
    job = Job(tmp_path, local(), keep=2)
    assert job.resume() == 3
    job.train(1)
    # Purging takes complete checkpoints only, and never what is not ours.
    assert {"save-3", "save-4", "save-41.tmp", "save-60", "save-61", "save-62"} <= set(saved_steps(tmp_path))
    assert not {"save-1", "save-2"} & set(saved_steps(tmp_path))


def test_steps_are_numbers(tmp_path: Path):
    Job(tmp_path, local()).train(10)
    assert Job(tmp_path, local()).resume() == 10  # not 9, which is the last by name


def test_an_interrupted_save_keeps_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(tmp_path, local(), keep=1)
    job.train(1)

    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "commit.json.tmp":
            raise OSError(28, "No space left on device")
        return rename(self, target)  # those of torch, inside

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match=r"could not save the checkpoint .*save-2: .*No space") as error:
            job.train(1)
    assert "checkpointing.on_save_failure: continue" in error.value.__notes__[0]
    assert saved_steps(tmp_path) == ["save-1", "save-2.partial"]
    again = Job(tmp_path, local(), keep=1)
    assert again.resume() == 1
    again.train(1)
    assert saved_steps(tmp_path) == ["save-2"]
    assert Job(tmp_path, local()).resume() == 2


def test_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    complete_at_each_deletion: list[int] = []
    original = shutil.rmtree

    def watched(path: Path, *args: object, **kwargs: object) -> None:
        complete = [found for found in (tmp_path / "run").glob("save-*") if (found / ".metadata").exists()]
        complete_at_each_deletion.extend([len(complete)] if Path(path).exists() else [])
        original(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watched)
    Job(tmp_path, local(), keep=2).train(12)
    assert saved_steps(tmp_path) == ["save-11", "save-12"]
    assert complete_at_each_deletion == [3] * 10


@pytest.mark.world_size(2)
def test_the_best_are_kept_after_a_resume_too(tmp_path: Path):
    """By hand: of 5, 3, nan, none, 3, 2, 4 the smallest two are at steps 6 and 2 (before the equal one at 5)."""
    values = {1: 5.0, 2: 3.0, 3: math.nan, 4: None, 5: 3.0, 6: 2.0, 7: 4.0}
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    best = {"metric": "loss", "mode": "min", "num_to_keep": 2}

    def job() -> Job:
        return Job(tmp_path, context, keep=1, best=best, value_at=values.__getitem__)

    job().train(4)
    assert saved_steps(tmp_path) == ["save-1", "save-2", "save-4"]
    resumed = job()
    assert resumed.resume() == 4
    resumed.train(3)
    assert saved_steps(tmp_path) == ["save-2", "save-6", "save-7"]


def test_two_jobs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("d9d.checkpoint.folder._LOCK_WAIT_S", 0.1)
    first, second = Job(tmp_path, local()), Job(tmp_path, local())
    with first.checkpointer.open():
        first.train(1)
        assert second.resume() == 1  # who only reads is let in
        with pytest.raises(
            OSError, match=r"another job that saves checkpoints to .*run is in progress, led by process"
        ):
            second.train(1)
        refused = pytest.raises(OSError, match=r"another name \(run\.name\)")
        with refused, second.checkpointer.open():
            pass
        first.train(1)
    # It would write another save-2, and go on from there.
    with (
        pytest.raises(RuntimeError, match=r"has saved .*save-2 since this one resumed from step 1"),
        second.checkpointer.open(),
    ):
        pass
    third = Job(tmp_path, local())
    assert third.resume() == 2
    for _ in range(2):  # its own checkpoints are no other job's
        with third.checkpointer.open():
            third.train(1)
    assert saved_steps(tmp_path) == ["save-1", "save-2", "save-3", "save-4"]


@pytest.mark.world_size(2)
def test_a_checkpoint_that_another_job_saves_before_this_one_has_the_lock(tmp_path: Path):
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    Job(tmp_path, context).train(1)
    job, other = Job(tmp_path, context), Job(tmp_path, context)
    assert [each.resume() for each in (job, other)] == [1, 1]
    other.train(1)
    with pytest.raises(RuntimeError, match=r"save-2 since this one resumed from step 1"), job.checkpointer.open():
        pass  # no rank gets here


MESHES = {"hybrid": {"data_parallel_replicate": 2, "data_parallel_shard": 2}, "shard": {"data_parallel_shard": 4}}


@pytest.mark.world_size(4)
def test_resume_on_another_mesh(tmp_path: Path):
    hybrid = DeviceMeshParameters(**MESHES["hybrid"]).build()
    Job(tmp_path, hybrid).train(2)
    job = Job(tmp_path, DeviceMeshParameters(**MESHES["shard"]).build(), keep=1)
    assert job.resume() == 2
    job.train(1)
    assert saved_steps(tmp_path) == ["save-3"]


@pytest.mark.world_size(2)
def test_rank_0_decides(tmp_path: Path):
    """Ranks may see a shared disk at different times."""
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    Job(tmp_path, context).train(2)
    job = Job(tmp_path, context)
    if context.rank == 1:
        job.checkpointer.save_dir = tmp_path / "not there yet"
    assert job.resume() == 2
    dist.barrier()


def test_only_trainable_entries():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    module.register_buffer("table", torch.zeros(1))
    tracked = TrackedModules(local(), [module], only_trainable)
    assert list(tracked.state_dict()) == ["pp_0_stage_0"]
    assert list(tracked.state_dict()["pp_0_stage_0"]) == ["weight", "table"]
    tracked.load_state_dict({"pp_0_stage_0": {"weight": torch.ones(2, 2), "table": torch.ones(1)}})
    assert module.weight.eq(1).all()
    assert module.get_buffer("table").eq(1).all()
    everything_tracked = TrackedModules(local(), [module], everything)
    assert_close_tree(everything_tracked.state_dict()["pp_0_stage_0"], dict(module.state_dict()), atol=0, rtol=0)
    with pytest.raises(RuntimeError, match=r"pp_0_stage_0: missing \['bias', 'table'\], unexpected \['other'\]"):
        everything_tracked.load_state_dict({"pp_0_stage_0": {"weight": torch.ones(2, 2), "other": torch.ones(1)}})


@pytest.mark.world_size(2)
def test_what_rank_0_cannot_write_fails_on_all_ranks(tmp_path):
    if dist.get_rank() == 0:
        (tmp_path / "run").write_text("a file where the folder of the run should be")
    dist.barrier()
    job = Job(tmp_path, DeviceMeshParameters(data_parallel_shard=2).build())
    with pytest.raises(OSError, match=r"could not save the checkpoint .*save-1: on rank 0 of 2: Not a directory"):
        job.train(1)


class FailingState(Stateful):
    """Cannot be saved, or loaded, on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise KeyError("no such counter")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing has been read")


@pytest.mark.world_size(2)
def test_a_state_that_one_rank_cannot_give_fails_on_all_before_anything_is_written(tmp_path: Path):
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    job = Job(tmp_path, context)
    job.train(1)
    job.schedule.step()
    refusal = r"on rank 1 of 2: KeyError: 'no such counter'"
    with pytest.raises(RuntimeError, match=rf"could not save the checkpoint .*save-2: {refusal}"):
        job.checkpointer.checkpoint_if_needed(FailingState())
    assert saved_steps(tmp_path) == ["save-1"]
    with pytest.raises(RuntimeError, match=refusal):
        job.checkpointer.load_last_checkpoint(FailingState())
    assert Job(tmp_path, context).resume() == 1


@pytest.mark.world_size(2)
def test_a_rank_that_does_not_come_ends_the_others_at_the_time_limit(tmp_path: Path):
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    job = Job(tmp_path, context, timeout_s=1.0)
    done = tmp_path / "done"
    if context.rank == 0:
        with pytest.raises(RuntimeError, match=r"could not save the checkpoint .*save-1: .*[Tt]imed? ?out"):
            job.train(1)
        done.touch()
    else:
        while not done.exists():  # alive, and elsewhere
            time.sleep(0.05)
    assert not (tmp_path / "run" / "save-1").exists()
