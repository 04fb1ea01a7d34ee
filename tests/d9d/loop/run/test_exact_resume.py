"""A job that is stopped three times equals one that is not, bit for bit: losses, norms, learning rates, samples, random numbers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.event.catalogue.train import EVENT_TRAIN_OPTIMIZER_STEP_PRE, EVENT_TRAIN_STEP_POST
from d9d.pipelining.training import PipelinedOptimizer
from tests.d9d.loop.run.regression_job import Job, build_job
from tests.harness.parity import named_full_parameters

PERIOD = 2
STOPS = (3, 5, 7)
"""Steps in the middle of which the job is stopped: each time the one before last is saved."""
NUM_STEPS = 26
"""20 after the last resumption."""


class StoppedError(Exception):
    """Ends a job in the middle of a step."""


@dataclasses.dataclass
class Leg:
    """What a job has done between a start and its end, by step from 1."""

    job: Job
    learning_rates: dict[int, list[float]]
    random_states: dict[int, torch.Tensor]

    def losses_and_norms(self) -> dict[str, dict[int, float]]:
        return {name: self.job.logged(name) for name in ("loss", "l2_grad_norm_total")}


def run(mesh: DeviceMeshParameters, folder: Path, saved: Path, *, stop: int | None) -> Leg:
    period = "disable" if stop is None else PERIOD
    job = build_job(
        mesh,
        folder,
        total_steps=NUM_STEPS,
        dropout=0.5,
        overrides={"checkpointing": {"save_dir": str(saved), "period_steps": period}},
    )
    leg = Leg(job, {}, {})
    trainer = job.trainer._state
    optimizer = trainer.optimizer
    assert isinstance(optimizer, PipelinedOptimizer)

    def note(context: Any) -> None:
        step = context.schedule.current_step + 1
        (of_stage,) = optimizer.by_stage.values()
        assert isinstance(of_stage, torch.optim.Optimizer)
        leg.learning_rates[step] = [group["lr"] for group in of_stage.param_groups]
        leg.random_states[step] = torch.get_rng_state()

    def stop_at(context: Any) -> None:
        if context.schedule.current_step + 1 == stop:
            raise StoppedError

    trainer.event_bus.subscribe(EVENT_TRAIN_STEP_POST, note)
    trainer.event_bus.subscribe(EVENT_TRAIN_OPTIMIZER_STEP_PRE, stop_at)
    if stop is None:
        job.trainer.train()
    else:
        with pytest.raises(StoppedError):
            job.trainer.train()
    return leg


def check(mesh: DeviceMeshParameters, folder: Path) -> None:
    straight = run(mesh, folder / "straight", folder / "of straight", stop=None)
    starts = [0, *(stop - 1 for stop in STOPS)]
    read_per_step = len(straight.job.task.read) // NUM_STEPS
    assert read_per_step > 1  # accumulation
    for number, (start, stop) in enumerate(zip(starts, [*STOPS, None], strict=True)):
        leg = run(mesh, folder / str(number), folder / "saved", stop=stop)
        done = list(range(start + 1, NUM_STEPS + 1 if stop is None else stop))
        assert leg.learning_rates == {step: straight.learning_rates[step] for step in done}
        for step, state in leg.random_states.items():
            assert torch.equal(state, straight.random_states[step]), step
        expected = straight.job.task.read[start * read_per_step :]
        assert leg.job.task.read == expected[: len(leg.job.task.read)]
        if not dist.is_initialized() or dist.get_rank() == 0:
            for name, values in leg.losses_and_norms().items():
                assert set(done[:-1]) <= values.keys()
                assert values.items() <= straight.losses_and_norms()[name].items(), name
        if stop is None:
            weights = named_full_parameters(straight.job.model)
            for name, value in named_full_parameters(leg.job.model).items():
                assert torch.equal(value, weights[name]), name


def test_one_process(tmp_path: Path):
    check(DeviceMeshParameters(), tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "degrees",
    [{"data_parallel_shard": 2}, pytest.param({"data_parallel_replicate": 2}, marks=pytest.mark.exhaustive)],
)
def test_two_ranks(tmp_path: Path, degrees: dict[str, int]):
    check(DeviceMeshParameters(**degrees), tmp_path)


@pytest.mark.world_size(4)
def test_four_ranks(tmp_path: Path):
    check(DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2), tmp_path)
