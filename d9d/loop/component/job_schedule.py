"""The position of a job in its steps."""

from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.agreement import agree_on
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d.core.protocol import MicrobatchPackStream
from d9d.internals.model_states import failing_together
from d9d.loop.config import JobScheduleConfig, StepActionPeriod, StepActionSpecial

__all__ = ["JobSchedule", "build_job_schedule", "too_many_steps"]


class JobSchedule(Stateful):
    """Counts the steps of a job and tells when periodic actions are due.

    Steps are counted from 1 wherever a number meets the user: step n is the n-th update, its values are logged under n,
    and the checkpoint after it is `save-n`.

    Args:
        config: Number of steps.
        stream: Data stream; sets the number of steps if the config leaves it open.

    Raises:
        ValueError: The job has no end, or more steps than the data stream.
    """

    def __init__(self, config: JobScheduleConfig, stream: MicrobatchPackStream) -> None:
        available = stream.total_steps
        total_steps = available if config.total_steps is None else config.total_steps
        if total_steps is not None and available is not None and total_steps > available:
            raise ValueError(too_many_steps(total_steps, available))
        if total_steps is None:
            raise ValueError(
                "the job has no end: schedule.total_steps is not set, and the data stream does not know its length. "
                "Set schedule.total_steps."
            )
        self._total_steps = total_steps
        self._current_step = 0

    def step(self) -> None:
        """Count the step that is under way as done."""
        self._current_step += 1

    @property
    def current_step(self) -> int:
        """Number of steps that are done."""
        return self._current_step

    @property
    def total_steps(self) -> int:
        """Number of steps of the job."""
        return self._total_steps

    @property
    def step_in_progress(self) -> int:
        """Number, from 1, of the step under way; the last one once the job is done."""
        return min(self._current_step + 1, self._total_steps)

    def should_do_action(
        self,
        action: StepActionPeriod,
        enable_on_last_step_if_periodic: bool = False,
        is_post_step_action: bool = False,
    ) -> bool:
        """Tell whether an action is due at the end of the step under way.

        Args:
            action: Period of the action.
            enable_on_last_step_if_periodic: A numeric period also acts on the last step.
            is_post_step_action: The caller asks after `step()` has counted the step, and not before.
        """
        number = self._current_step if is_post_step_action else self._current_step + 1
        is_last = number == self._total_steps
        match action:
            case StepActionSpecial.disable:
                return False
            case StepActionSpecial.last_step:
                return is_last
            case int():
                return number % action == 0 or (enable_on_last_step_if_periodic and is_last)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps that are done."""
        return {"current_step": self._current_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the saved step."""
        self._current_step = state_dict["current_step"]


def too_many_steps(total_steps: int, available: int) -> str:
    """Say that a job has more steps than its data."""
    return (
        f"schedule.total_steps ({total_steps}) is more than the data has ({available}). Lower it, or leave it out to stop "
        "where the data ends, or raise num_epochs (null: no end)."
    )


def build_job_schedule(
    context: DistributedContext, config: JobScheduleConfig, stream: MicrobatchPackStream
) -> JobSchedule:
    """Build the schedule of a job, and refuse data streams of different lengths. All ranks must call it; blocks.

    Args:
        context: Topology of the job.
        config: Number of steps.
        stream: Data stream of this rank.

    Raises:
        ValueError: On all ranks; see `JobSchedule`. Or ranks would run different numbers of steps.
    """
    with failing_together(context):
        schedule = JobSchedule(config, stream)
    agree_on(
        Participants(context.groups[:1]),
        "the steps of the job",
        {"schedule.total_steps": schedule.total_steps},
        "Ranks would wait for those that are through: set schedule.total_steps to the lowest, or give all ranks equally much data.",
    )
    return schedule
