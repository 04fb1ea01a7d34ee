"""A handler that ends the job at a loss spike, and the next start, which goes back to a checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.control import ComputeLossResult
from d9d.loop.event.catalogue.common import EventStepContext
from d9d.loop.event.catalogue.train import EVENT_TRAIN_LOSS_SPIKE, EVENT_TRAIN_RESUMED, EventLossSpikeContext
from tests.d9d.loop.run.regression_job import GLOBAL_BATCH_SIZE, Job, Task, build_job
from tests.harness.parity import named_full_parameters

SPIKE_STEP = 5
PERIOD_STEPS = 4
TOTAL_STEPS = 8


class SpikeError(RuntimeError):
    pass


class SpikingTask(Task):
    """Has a large loss in one step."""

    def compute_loss(self, ctx) -> ComputeLossResult:
        result = super().compute_loss(ctx)
        if ctx.schedule.step_in_progress == SPIKE_STEP:
            return ComputeLossResult(loss=result.loss * 1e6, loss_weight=result.loss_weight)
        return result


class SpikingOnce(SpikingTask):
    """Has none when the step is done again."""

    def __init__(self, weight) -> None:
        super().__init__(weight)
        self.steps: list[int] = []

    def compute_loss(self, ctx) -> ComputeLossResult:
        num_seen = self.steps.count(ctx.schedule.step_in_progress)
        self.steps.append(ctx.schedule.step_in_progress)
        num_microbatches = GLOBAL_BATCH_SIZE // 2 // dist.get_world_size()
        return super().compute_loss(ctx) if num_seen < num_microbatches else Task.compute_loss(self, ctx)


def start(folder: Path, task_class: type[Task], mesh: DeviceMeshParameters | None = None) -> tuple[Job, list[int]]:
    job = build_job(
        mesh or DeviceMeshParameters(),
        folder,
        total_steps=TOTAL_STEPS,
        task_class=task_class,
        overrides={
            "checkpointing": {"save_dir": str(folder / "saved"), "period_steps": PERIOD_STEPS},
            "loss_spike": {"window_steps": 4},
        },
    )
    resumed_at: list[int] = []

    def end(context: EventLossSpikeContext) -> None:
        raise SpikeError(f"step {context.step}")

    def note(context: EventStepContext) -> None:
        resumed_at.append(context.schedule.current_step)

    job.trainer._state.event_bus.subscribe(EVENT_TRAIN_LOSS_SPIKE, end)
    job.trainer._state.event_bus.subscribe(EVENT_TRAIN_RESUMED, note)
    return job, resumed_at


def test_a_job_goes_back_to_before_a_spike(tmp_path: Path):
    job, resumed_at = start(tmp_path, SpikingTask)
    with pytest.raises(SpikeError, match=f"step {SPIKE_STEP}"):
        job.trainer.train()
    assert resumed_at == []
    job, resumed_at = start(tmp_path, Task)
    job.trainer.train()
    assert resumed_at == [PERIOD_STEPS]
    # Those of the steps that were done again are of the second start.
    straight, _ = start(tmp_path / "straight", Task)
    straight.trainer.train()
    assert job.losses() == straight.losses()


@pytest.mark.world_size(2)
def test_all_ranks_go_back_in_the_same_process(tmp_path: Path):
    mesh = DeviceMeshParameters(data_parallel_shard=2)
    job, resumed_at = start(tmp_path, SpikingOnce, mesh)
    with pytest.raises(SpikeError, match=f"step {SPIKE_STEP}"):
        job.trainer.train()
    job.trainer.train()
    assert resumed_at == [PERIOD_STEPS]
    straight, _ = start(tmp_path / "straight", Task, mesh)
    straight.trainer.train()
    for name, value in named_full_parameters(straight.model).items():
        assert torch.equal(named_full_parameters(job.model)[name], value)
    if dist.get_rank() == 0:
        assert job.losses() == straight.losses()
