"""Values that wait for the host, and the order in which they are written."""

import pytest
import torch

from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.tracker_writer import PendingTrackerWrites, TrackerWriter
from d9d.loop.config import JobScheduleConfig
from d9d.tracker import BaseTrackerRun, Histogram, Scalar, TrackerPoint, TrackerValue


class ListRun(BaseTrackerRun):
    def __init__(self) -> None:
        self.lines: list[tuple[int, str, object, dict[str, str]]] = []

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        shown = value.counts.tolist() if isinstance(value, Histogram) else value.value
        self.lines.append((point.step, point.name, shown, point.context))


class Stream:
    total_steps = 10


def build(max_pending_steps: int = 2) -> tuple[PendingTrackerWrites, TrackerWriter, JobSchedule, ListRun]:
    pending, run = PendingTrackerWrites(max_pending_steps), ListRun()
    pending.attach(run)
    schedule = JobSchedule(JobScheduleConfig(), Stream())  # type: ignore[arg-type]
    return pending, TrackerWriter(pending, schedule, {"split": "train"}), schedule, run


def test_values_wait_for_the_steps_that_they_may():
    pending, writer, schedule, run = build(max_pending_steps=2)
    written = []
    for step in range(1, 5):
        writer.log("loss", Scalar(torch.tensor(step / 2)))
        written.append(pending.release(schedule.step_in_progress))
        schedule.step()
    assert written == [{}, {}, {1: {"loss": 0.5}}, {2: {"loss": 1.0}}]
    assert pending.flush() == {3: {"loss": 1.5}, 4: {"loss": 2.0}}
    assert [line[0] for line in run.lines] == [1, 2, 3, 4]


def test_a_tensor_keeps_the_value_of_when_it_was_logged():
    pending, writer, _, run = build()
    loss = torch.tensor(1.0)
    writer.log("loss", Scalar(loss))
    loss.zero_()
    pending.flush()
    assert run.lines == [(1, "loss", 1.0, {"split": "train"})]


def test_numbers_histograms_and_labels():
    pending, writer, _, run = build()
    writer.log("lr", Scalar(0.5), context={"group": "a"})
    writer.log("load", Histogram(torch.tensor([1, 2])))
    pending.flush()
    assert run.lines == [
        (1, "lr", 0.5, {"split": "train", "group": "a"}),
        (1, "load", [1, 2], {"split": "train"}),
    ]


def test_without_a_run_nothing_is_kept():
    pending, writer, _, run = build()
    pending.attach(None)
    writer.log("loss", Scalar(1.0))
    assert pending.flush() == {}
    assert run.lines == []


def test_the_newest_value_is_taken_once():
    pending, writer, schedule, _ = build()
    assert pending.take_newest("loss") is None
    for value in (1.0, 2.0):
        writer.log("loss", Scalar(torch.tensor(value)))
        schedule.step()
    writer.log("load", Histogram(torch.tensor([1, 2])))
    assert pending.take_newest("loss") == 2.0
    assert pending.take_newest("loss") is None
    with pytest.raises(ValueError, match=r"no value of the name 'load' is logged; there are loss\."):
        pending.take_newest("load")
    pending.flush()
    writer.log("loss", Scalar(0.5))
    assert pending.take_newest("loss") == 0.5
