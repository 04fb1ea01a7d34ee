"""Jobs that sleep between steps train on as if they had not, bit for bit, and hold no memory meanwhile."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.offload import SleepTag
from d9d.core.placement import compute_leaf, local_tensor
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_FORWARD_BACKWARD_POST,
    EVENT_TRAIN_FORWARD_BACKWARD_PRE,
    EVENT_TRAIN_PREEMPTED,
    EVENT_TRAIN_READY,
    EVENT_TRAIN_SLEEP_POST,
    EVENT_TRAIN_STEP_POST,
    EVENT_TRAIN_STEP_PRE,
    EVENT_TRAIN_WAKE_PRE,
)
from tests.d9d.loop.run.pipelined_job import PipelinedProvider
from tests.d9d.loop.run.regression_job import Job, build_job
from tests.harness.parity import named_full_parameters

MESHES = {
    1: [DeviceMeshParameters()],
    2: [DeviceMeshParameters(data_parallel_replicate=2), DeviceMeshParameters(data_parallel_shard=2)],
    4: [
        DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2),
        DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2),
    ],
}


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    """All that a job holds of its model: parameters, what modules compute with, gradients, states of optimizers."""
    state = job.trainer._state
    found: dict[str, torch.Tensor] = {}
    for stage, module in enumerate(state.tracked_modules.modules):
        for name, parameter in module.named_parameters():
            found[f"{stage}.{name}"] = local_tensor(parameter)
            found[f"{stage}.{name}.leaf"] = local_tensor(compute_leaf(parameter))
            if parameter.grad is not None:
                found[f"{stage}.{name}.grad"] = local_tensor(parameter.grad)
    for stage, optimizer in enumerate(state.optimizer._optimizers):
        for number, values in enumerate(optimizer.state.values()):
            found |= {f"{stage}.state.{number}.{name}": local_tensor(value) for name, value in values.items()}
    return found


def sleep_twice(job: Job) -> None:
    trainer, before = job.trainer, tensors_of(job)
    contents = {name: (tensor.stride(), tensor.clone()) for name, tensor in before.items()}
    storages = {name: tensor.untyped_storage() for name, tensor in before.items()}
    for _ in range(2):
        trainer.sleep()
        trainer.sleep()
        assert trainer.is_sleeping(SleepTag.TENSOR_STATES)
        assert {storage.nbytes() for storage in storages.values()} == {0}
        assert all(tensor.numel() == 0 for tensor in before.values())
        with pytest.raises(
            RuntimeError, match=r"export\(\) needs a job that is awake, but it sleeps \(tensor_states\)"
        ):
            trainer.export(Path("nowhere"), load_checkpoint=False)
        trainer.wake()
        trainer.wake()
        assert not trainer.is_sleeping(SleepTag.TENSOR_STATES)
        after = tensors_of(job)
        assert set(after) == set(before)
        for name, tensor in after.items():
            stride, values = contents[name]
            assert tensor.stride() == stride, name
            assert torch.equal(tensor, values), name


def check(mesh: DeviceMeshParameters, folder: Path) -> None:
    # Schedules with split backward passes have gradients of their own kind.
    schedule = {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True}
    is_pipelined = mesh.pipeline_parallel > 1
    jobs = [
        build_job(
            mesh,
            folder / name,
            total_steps=6,
            model_provider=PipelinedProvider(torch.float64) if is_pipelined else None,
            overrides={"pipelining": {"schedule": schedule}} if is_pipelined else None,
        )
        for name in ("awake", "asleep")
    ]
    slept: list[int] = []

    def on_step(context) -> None:
        if context.schedule.current_step in (0, 3):
            slept.append(context.schedule.current_step)
            sleep_twice(jobs[1])

    events: list[str] = []
    bus = jobs[1].trainer._state.event_bus
    bus.subscribe(EVENT_TRAIN_STEP_POST, on_step)
    bus.subscribe(EVENT_TRAIN_SLEEP_POST, lambda context: events.append(" ".join(["sleep", *context.tags])))
    bus.subscribe(EVENT_TRAIN_WAKE_PRE, lambda context: events.append(" ".join(["wake", *context.tags])))
    sleep_twice(jobs[1])  # before the first step, without gradients and states
    for job in jobs:
        job.trainer.train()
    sleep_twice(jobs[1])
    assert slept == [0, 3]
    assert events == ["sleep tensor_states", "wake tensor_states"] * 8
    for awake, asleep in zip(*(job.trainer._state.tracked_modules.modules for job in jobs), strict=True):
        expected = named_full_parameters(awake)
        for name, value in named_full_parameters(asleep).items():
            assert torch.equal(value, expected[name]), name
    if dist.get_rank() == 0:
        assert jobs[0].losses() == jobs[1].losses()
        assert len(jobs[0].losses()) == 6


@pytest.mark.world_size(1)
def test_one_process(tmp_path):
    check(MESHES[1][0], tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
def test_two_ranks(tmp_path, mesh):
    check(mesh, tmp_path)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=["hybrid", "pipeline"])
def test_four_ranks(tmp_path, mesh):
    check(mesh, tmp_path)


@pytest.mark.world_size(1)
def test_what_is_not_possible_is_refused(tmp_path):
    job = build_job(DeviceMeshParameters(), tmp_path / "a", total_steps=2)
    with pytest.raises(NotImplementedError, match="communicators can not be given up"):
        job.trainer.sleep([SleepTag.TENSOR_STATES, SleepTag.COMMS])
    assert not job.trainer.is_sleeping(SleepTag.TENSOR_STATES)
    bus = job.trainer._state.event_bus
    bus.subscribe(EVENT_TRAIN_FORWARD_BACKWARD_POST, lambda context: job.trainer.sleep())
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        job.trainer.train()
    other = build_job(DeviceMeshParameters(), tmp_path / "b", total_steps=2)
    other.trainer._state.event_bus.subscribe(EVENT_TRAIN_STEP_POST, lambda context: other.trainer.sleep())
    with pytest.raises(RuntimeError, match="the loop needs a job that is awake"):
        other.trainer.train()
    with pytest.raises(RuntimeError, match=r"train\(\) needs a job that is awake"):
        other.trainer.train()


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("event", "what"),
    [
        (EVENT_TRAIN_READY, "a step"),
        (EVENT_TRAIN_STEP_PRE, "a step"),
        (EVENT_TRAIN_FORWARD_BACKWARD_PRE, "a step"),
        (EVENT_TRAIN_PREEMPTED, "the last checkpoint"),
    ],
)
def test_a_job_that_sleeps_neither_trains_nor_saves(tmp_path, event, what):
    job = build_job(DeviceMeshParameters(), tmp_path, total_steps=2)
    bus = job.trainer._state.event_bus
    bus.subscribe(EVENT_TRAIN_STEP_POST, lambda context: os.kill(os.getpid(), signal.SIGTERM))
    bus.subscribe(event, lambda context: job.trainer.sleep())
    with pytest.raises(RuntimeError, match=f"{what} needs a job that is awake"):
        job.trainer.train()
