"""Signals end a job between two steps, on all ranks, with a checkpoint and an exit code."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.preemption import PreemptedExit
from d9d.loop.event.catalogue import train as events
from d9d.pipelining.factory import PipelineSchedule1F1BConfig
from tests.d9d.loop.run.pipelined_job import PipelinedProvider
from tests.d9d.loop.run.regression_job import Job, Task, build_job
from tests.harness.parity import named_full_parameters

TOTAL_STEPS = 12
REPLICATE = DeviceMeshParameters(data_parallel_replicate=2)
SHARD = DeviceMeshParameters(data_parallel_shard=2)


def build(folder: Path, mesh: DeviceMeshParameters = SHARD, *, checkpoints: dict | None = None, **options) -> Job:
    saving = {"save_dir": str(folder / "saved"), "period_steps": 100, **(checkpoints or {})}
    overrides = {"checkpointing": saving, **options}
    return build_job(mesh, folder, total_steps=TOTAL_STEPS, dropout=0.5, overrides=overrides)


def act_at(job: Job, event, step: int, act: Callable[[], None]) -> None:
    """Do something in an event of a step, counted from 1."""

    def handle(context) -> None:
        if context.schedule.current_step + 1 == step:
            act()

    job.trainer._state.event_bus.subscribe(event, handle)


def signal_on(rank: int | None, signum: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Send a signal to one rank, or to all."""

    def send() -> None:
        if rank is None or dist.get_rank() == rank:
            os.kill(os.getpid(), signum)

    return send


def train_until_preempted(job: Job) -> PreemptedExit:
    with pytest.raises(PreemptedExit) as caught:
        job.trainer.train()
    return caught.value


def steps_of_all_ranks(job: Job) -> list[int]:
    steps = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor(job.trainer._state.schedule.current_step))
    return [int(step) for step in steps]


def saved_steps(folder: Path) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in (folder / "saved" / "job").iterdir())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=["replicate", "shard"])
def test_a_stopped_job_resumes_bit_for_bit(tmp_path, mesh):
    straight = build(tmp_path / "straight", mesh)
    straight.trainer.train()
    first = build(tmp_path / "stopped", mesh)
    act_at(first, events.EVENT_TRAIN_FORWARD_BACKWARD_POST, 4, signal_on(1))
    ended = train_until_preempted(first)
    assert (ended.code, ended.signum) == (128 + 15, signal.SIGTERM)
    # The exchanges are before steps 1, 3, 7, 15, ..., while steps are fast.
    (step,) = set(steps_of_all_ranks(first))
    assert 4 <= step <= 6
    assert saved_steps(tmp_path / "stopped") == [f"save-{step}"]
    second = build(tmp_path / "stopped", mesh)
    second.trainer.train()
    assert first.task.read + second.task.read == straight.task.read
    expected = named_full_parameters(straight.model)
    for name, value in named_full_parameters(second.model).items():
        assert torch.equal(value, expected[name]), name
    if dist.get_rank() == 0:
        losses = straight.losses()
        assert second.losses() == {number: losses[number] for number in second.losses()}


PLACES = [
    events.EVENT_TRAIN_READY,
    events.EVENT_TRAIN_STEP_PRE,
    events.EVENT_TRAIN_FORWARD_BACKWARD_PRE,
    events.EVENT_TRAIN_OPTIMIZER_STEP_PRE,
    events.EVENT_TRAIN_STEP_POST,
]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("event", PLACES, ids=[event.id for event in PLACES])
@pytest.mark.parametrize("rank", [0, None], ids=["one", "all"])
def test_signals_anywhere_end_all_ranks_after_the_same_step(tmp_path, event, rank):
    job = build(tmp_path)
    send = signal_on(rank, signal.SIGUSR1)
    if event == events.EVENT_TRAIN_READY:
        job.trainer._state.event_bus.subscribe(event, lambda context: send())
    else:
        act_at(job, event, 2, send)
    before = signal.getsignal(signal.SIGUSR1)
    assert train_until_preempted(job).code == 128 + 10
    assert signal.getsignal(signal.SIGUSR1) == before
    (step,) = set(steps_of_all_ranks(job))
    if event == events.EVENT_TRAIN_READY:
        # Nothing is done, so there is nothing to save.
        assert step == 0
        assert not list((tmp_path / "saved").rglob("save-*"))
    else:
        assert step == 2
        assert saved_steps(tmp_path) == ["save-2"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_ends_after_the_same_step(tmp_path, rank):
    job = build_job(
        DeviceMeshParameters(pipeline_parallel=2),
        tmp_path,
        total_steps=TOTAL_STEPS,
        overrides={
            "checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 100},
            "pipelining": {"schedule": PipelineSchedule1F1BConfig()},
        },
        model_provider=PipelinedProvider(torch.float64),
    )
    act_at(job, events.EVENT_TRAIN_FORWARD_BACKWARD_PRE, 2, signal_on(rank))
    assert train_until_preempted(job).code == 143
    assert steps_of_all_ranks(job) == [2, 2]
    assert saved_steps(tmp_path) == ["save-2"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path, async_save):
    job = build(tmp_path, checkpoints={"period_steps": 2, "async_save": async_save})
    act_at(job, events.EVENT_TRAIN_STEP_PRE, 2, signal_on(0))
    preempted: list[tuple[int, str]] = []
    job.trainer._state.event_bus.subscribe(
        events.EVENT_TRAIN_PREEMPTED,
        lambda context: preempted.append((context.schedule.current_step, context.signal_name)),
    )
    train_until_preempted(job)
    assert preempted == [(2, "SIGTERM")]
    assert saved_steps(tmp_path) == ["save-2"]


class SignalledInSave(Task):
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().state_dict()


@pytest.mark.world_size(2)
def test_a_signal_in_a_save_lets_it_be_committed(tmp_path):
    saving = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2}}
    job = build_job(SHARD, tmp_path, total_steps=TOTAL_STEPS, overrides=saving, task_class=SignalledInSave)
    assert train_until_preempted(job).code == 143
    assert steps_of_all_ranks(job) == [2, 2]
    assert saved_steps(tmp_path) == ["save-2"]


@pytest.mark.world_size(2)
def test_a_background_save_is_complete_when_the_process_ends(tmp_path):
    job = build(tmp_path, checkpoints={"async_save": True})
    act_at(job, events.EVENT_TRAIN_STEP_PRE, 2, signal_on(0))
    train_until_preempted(job)
    assert saved_steps(tmp_path) == ["save-2"]
    resumed = build(tmp_path)
    resumed.trainer.train()
    assert len(resumed.task.read) == 40  # 10 steps of 4 microbatches
    dist.barrier()


@pytest.mark.world_size(2)
def test_a_signal_in_the_last_step_lets_the_job_finish(tmp_path):
    job = build(tmp_path)
    act_at(job, events.EVENT_TRAIN_FORWARD_BACKWARD_PRE, TOTAL_STEPS, signal_on(None))
    job.trainer.train()
    assert job.trainer._state.schedule.current_step == TOTAL_STEPS
    assert saved_steps(tmp_path) == [f"save-{TOTAL_STEPS}"]


@pytest.mark.world_size(2)
def test_a_job_without_checkpoints_ends_without_one(tmp_path):
    job = build(tmp_path, checkpoints={"period_steps": "disable"})
    act_at(job, events.EVENT_TRAIN_STEP_PRE, 1, signal_on(0))
    assert train_until_preempted(job).code == 143
    assert not list((tmp_path / "saved").rglob("save-*"))


def test_signals_that_the_config_does_not_name_are_left_alone(tmp_path):
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: got.append(signum))
    try:
        job = build(tmp_path, DeviceMeshParameters(), preemption={"signals": ["SIGTERM"]})
        act_at(job, events.EVENT_TRAIN_STEP_PRE, 2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        job.trainer.train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]
    assert job.trainer._state.schedule.current_step == TOTAL_STEPS


def test_one_process_ends_after_the_step(tmp_path):
    job = build(tmp_path, DeviceMeshParameters())
    act_at(job, events.EVENT_TRAIN_FORWARD_BACKWARD_POST, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_until_preempted(job).code == 143
    assert job.trainer._state.schedule.current_step == 3
    assert [path.name for path in (tmp_path / "saved" / "job").iterdir()] == ["save-3"]
