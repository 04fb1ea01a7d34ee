"""A handler that ends the job at a loss spike, and the next start, which goes back to a checkpoint."""

from pathlib import Path

import pytest

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.control import ComputeLossResult
from d9d.loop.event.catalogue.common import EventStepContext
from d9d.loop.event.catalogue.train import EVENT_TRAIN_LOSS_SPIKE, EVENT_TRAIN_RESUMED, EventLossSpikeContext
from tests.d9d.loop.run.regression_job import Job, Task, build_job

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


def start(folder: Path, task_class: type[Task]) -> tuple[Job, list[int]]:
    job = build_job(
        DeviceMeshParameters(),
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
