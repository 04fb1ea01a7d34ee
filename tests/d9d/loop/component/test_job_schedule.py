"""Steps of a job, and when periodic actions are due."""

import pytest
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.component.job_schedule import JobSchedule, build_job_schedule
from d9d.loop.config import JobScheduleConfig, StepActionSpecial


class Stream:
    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps


def schedule(total_steps: int | None = None, stream_steps: int | None = None) -> JobSchedule:
    return JobSchedule(JobScheduleConfig(total_steps=total_steps), Stream(stream_steps))  # type: ignore[arg-type]


@pytest.mark.parametrize(("config", "stream", "expected"), [(5, None, 5), (None, 7, 7), (5, 7, 5)])
def test_the_config_goes_before_the_stream(config, stream, expected):
    assert schedule(config, stream).total_steps == expected


def test_a_job_without_end_is_refused():
    with pytest.raises(ValueError, match=r"Set schedule\.total_steps"):
        schedule()


def test_more_steps_than_the_data_has_are_refused():
    with pytest.raises(ValueError, match=r"schedule\.total_steps \(8\) is more than the data has \(7\)\. Lower it"):
        schedule(8, 7)


@pytest.mark.world_size(2)
def test_streams_of_different_lengths_are_refused_on_all_ranks():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    stream = Stream(7 - dist.get_rank())
    with pytest.raises(ValueError, match=r"schedule\.total_steps: 7 on rank 0; 6 on rank 1"):
        build_job_schedule(context, JobScheduleConfig(), stream)  # type: ignore[arg-type]
    with pytest.raises((ValueError, RuntimeError), match=r"more than the data has \(6\)"):
        build_job_schedule(context, JobScheduleConfig(total_steps=7), stream)  # type: ignore[arg-type]
    assert build_job_schedule(context, JobScheduleConfig(total_steps=6), stream).total_steps == 6  # type: ignore[arg-type]


def due_steps(action, **flags) -> list[int]:
    """Numbers of the steps, from 1, at whose end an action of a job of 7 steps is due."""
    job, due = schedule(7), []
    is_post = flags.get("is_post_step_action", False)
    for number in range(1, 8):
        if is_post:
            job.step()
        if job.should_do_action(action, **flags):
            due.append(number)
        if not is_post:
            job.step()
    return due


@pytest.mark.parametrize("is_post_step_action", [False, True])
@pytest.mark.parametrize(
    ("action", "on_last", "expected"),
    [
        (3, False, [3, 6]),
        (3, True, [3, 6, 7]),
        (7, True, [7]),
        (1, False, [1, 2, 3, 4, 5, 6, 7]),
        (10, False, []),
        (10, True, [7]),
        (StepActionSpecial.last_step, False, [7]),
        (StepActionSpecial.disable, True, []),
    ],
)
def test_due_steps(action, on_last, expected, is_post_step_action):
    flags = {"enable_on_last_step_if_periodic": on_last, "is_post_step_action": is_post_step_action}
    assert due_steps(action, **flags) == expected


def test_the_step_in_progress_counts_from_one_and_stays_at_the_last():
    job = schedule(2)
    numbers = [job.step_in_progress]
    for _ in range(2):
        job.step()
        numbers.append(job.step_in_progress)
    assert numbers == [1, 2, 2]


def test_a_loaded_schedule_goes_on():
    saved = schedule(4)
    saved.step()
    resumed = schedule(4)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.current_step == 1
