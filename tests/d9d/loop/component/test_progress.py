"""What the main rank shows of a job."""

import contextlib
import io
import logging
from collections.abc import Generator

import pytest

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.config import JobScheduleConfig

VALUES = {"loss": 0.123456, "l2_grad_norm_total": 12.5, "accuracy": 0.9}


class Stream:
    total_steps = 10


def build(is_terminal: bool, start_step: int = 0, **options) -> tuple[TrainingProgress, JobSchedule, logging.Logger]:
    schedule = JobSchedule(JobScheduleConfig(), Stream())  # type: ignore[arg-type]
    schedule.load_state_dict({"current_step": start_step})
    dist_context = DeviceMeshParameters().build()
    return TrainingProgress(dist_context, schedule, is_terminal=is_terminal, **options), schedule, dist_context.logger


@contextlib.contextmanager
def recorded(logger: logging.Logger) -> Generator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end():
    progress, schedule, logger = build(is_terminal=False)
    with recorded(logger) as lines, progress.open():
        for step in range(1, 11):
            schedule.step()
            progress.step()
            progress.show(step, VALUES)
    # Ten steps take less than the period of lines, so only the last one is there.
    (line,) = lines
    assert line.startswith("step 10/10 | loss 0.1235 | grad norm 12.5 | ")
    assert line.endswith("steps/s")


def test_speed_is_in_samples_when_their_number_is_known(monkeypatch):
    now_s = iter([100.0, 104.0, 104.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    # Steps 8 to 10 hold 4, 16 and 16 samples, in 4 seconds.
    progress, schedule, logger = build(
        is_terminal=False, start_step=7, num_samples_of=[*range(0, 33, 4), 48, 64].__getitem__
    )
    with recorded(logger) as lines, progress.open():
        for _ in range(3):
            schedule.step()
        progress.show(10, VALUES)
    assert lines[0].endswith("| 9 samples/s")


def test_a_terminal_gets_a_bar_that_starts_at_the_resumed_step(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    progress, schedule, logger = build(is_terminal=True, start_step=7)
    with recorded(logger) as lines, progress.open():
        schedule.step()
        progress.step()
        progress.show(8, VALUES)
    shown = terminal.getvalue()
    assert "7/10" in shown
    assert "8/10" in shown
    assert "loss=0.1235" in shown
    assert "grad norm=12.5" in shown
    assert lines == []


def test_the_bar_is_closed_when_the_job_fails(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    progress, _, _ = build(is_terminal=True)
    with pytest.raises(KeyError), progress.open():
        raise KeyError
    assert terminal.getvalue().endswith("\n")


@pytest.mark.world_size(2)
def test_other_ranks_are_silent():
    dist_context = DeviceMeshParameters(data_parallel_replicate=2).build()
    schedule = JobSchedule(JobScheduleConfig(), Stream())  # type: ignore[arg-type]
    progress = TrainingProgress(dist_context, schedule, is_terminal=False)
    with recorded(dist_context.logger) as lines, progress.open():
        progress.show(10, VALUES)
    assert len(lines) == (1 if dist_context.rank == 0 else 0)
