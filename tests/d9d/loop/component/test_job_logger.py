"""What a job writes to its tracker: which steps, which values, and what happens when it fails or resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.loop.component.job_logger import JobLogger
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import JobLoggerConfig, JobScheduleConfig
from d9d.metric.impl.aggregation import SumMetric, WeightedMeanMetric
from d9d.metric.impl.container import ComposeMetric
from d9d.tracker import RunConfig, Scalar


class Stream:
    total_steps = 5


class Shown:
    """Stands where the progress display is, and keeps what it was told."""

    def __init__(self) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []

    def show(self, step: int, values: dict[str, float]) -> None:
        self.values.append((step, dict(values)))


class Job:
    """Five steps that log the loss n, the norm 10 n and the sum of what each rank adds."""

    def __init__(self, folder: Path, period: Any, mesh: DeviceMeshParameters | None = None) -> None:
        self.folder = folder
        self.dist_context: DistributedContext = (mesh or DeviceMeshParameters()).build()
        self.metrics = ComposeMetric({"seen": SumMetric(), "nested": ComposeMetric({"mean": WeightedMeanMetric()})})
        self.schedule = JobSchedule(JobScheduleConfig(), Stream())  # type: ignore[arg-type]
        self.shown = Shown()
        self.logger = JobLogger(
            dist_context=self.dist_context,
            config=JobLoggerConfig.model_validate(
                {"period_steps": period, "tracker": {"provider": "jsonl", "path": str(folder / "log.jsonl")}}
            ),
            metrics=self.metrics,
            schedule=self.schedule,
            run_config=RunConfig(name="run", hparams={"lr": 1}),
            additional_hparams={"task": {"depth": 2}},
            progress=self.shown,  # type: ignore[arg-type]
        )

    def run(self, fails_after: int | None = None) -> None:
        with self.logger.new_run({"split": "train"}) as writer, self.logger.install():
            while self.schedule.current_step < self.schedule.total_steps:
                step = self.schedule.step_in_progress
                self.metrics.children["seen"].update(torch.tensor(float(self.dist_context.rank + 1)))
                mean = self.metrics.children["nested"].children["mean"]  # type: ignore[attr-defined]
                mean.update(torch.tensor(2.0 * step), torch.tensor(1.0))
                self.logger.trigger_sync()
                writer.log("lr", Scalar(0.5))
                self.logger.log(torch.tensor(float(step)), torch.tensor(10.0 * step))
                if step == fails_after:
                    raise KeyError
                self.schedule.step()

    def lines(self, name: str) -> dict[int, float]:
        records = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        return {record["step"]: record["value"] for record in records if record["name"] == name}


@pytest.mark.parametrize(
    ("period", "steps"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), ("last_step", [5]), ("disable", [])]
)
def test_selected_steps_are_written(tmp_path: Path, period: Any, steps: list[int]):
    job = Job(tmp_path, period)
    job.run()
    assert job.lines("loss") == {step: float(step) for step in steps}
    assert job.lines("l2_grad_norm_total") == {step: 10.0 * step for step in steps}
    assert job.lines("lr") == dict.fromkeys(range(1, 6), 0.5)


def test_metrics_start_anew_after_each_logged_step(tmp_path: Path):
    job = Job(tmp_path, 2)
    job.run()
    # Two steps, two steps, one step.
    assert job.lines("seen") == {2: 2.0, 4: 2.0, 5: 1.0}
    # Means of 2 and 4, of 6 and 8, and of 10.
    assert job.lines("nested/mean") == {2: 3.0, 4: 7.0, 5: 10.0}


def test_values_that_were_read_are_shown(tmp_path: Path):
    job = Job(tmp_path, 1)
    job.run()
    assert [step for step, _ in job.shown.values] == [1, 2, 3, 4, 5]
    assert job.shown.values[2][1]["loss"] == 3.0


def test_what_was_logged_before_a_failure_is_written(tmp_path: Path):
    job = Job(tmp_path, 1)
    with pytest.raises(KeyError):
        job.run(fails_after=3)
    assert job.lines("loss") == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_flush_writes_what_was_logged(tmp_path: Path):
    job = Job(tmp_path, 1)
    with job.logger.new_run({}), job.logger.install():
        job.logger.trigger_sync()
        job.logger.log(torch.tensor(1.0), torch.tensor(10.0))
        assert job.lines("loss") == {}
        job.logger.flush()
        assert job.lines("loss") == {1: 1.0}


def test_logging_needs_a_run(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"inside new_run\(\)"):
        Job(tmp_path, 1).logger.log(torch.tensor(0.0), torch.tensor(0.0))


def test_hyperparameters_that_are_no_dict_are_refused():
    with pytest.raises(TypeError, match="dump_hparams"):
        JobLogger(
            dist_context=DeviceMeshParameters().build(),
            config=JobLoggerConfig.model_validate({"period_steps": 1, "tracker": {"provider": "null"}}),
            metrics=ComposeMetric({}),
            schedule=JobSchedule(JobScheduleConfig(), Stream()),  # type: ignore[arg-type]
            run_config=RunConfig(name="run"),
            additional_hparams=[1],
        )


@pytest.mark.world_size(2)
def test_metrics_are_those_of_all_ranks_and_the_main_one_writes(tmp_path: Path):
    job = Job(tmp_path, 5, DeviceMeshParameters(data_parallel_replicate=2))
    job.run()
    torch.distributed.barrier()
    # Ranks add 1 and 2 in each of five steps.
    assert job.lines("seen") == {5: 5 * (1.0 + 2.0)}
    assert bool(job.shown.values) == (job.dist_context.rank == 0)
    assert ("main_process" in job.logger.state_dict()["tracker"]) == (job.dist_context.rank == 0)
