"""The position of a job in its steps."""

from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.protocol import MicrobatchPackStream
from d9d.loop.config import JobScheduleConfig, StepActionPeriod, StepActionSpecial

__all__ = ["JobSchedule"]


class JobSchedule(Stateful):
    """Counts the steps of a job and tells when periodic actions are due.

    Steps are counted from 1 wherever a number meets the user: step n is the n-th update, its values are logged under n,
    and the checkpoint after it is `save-n`.

    Args:
        config: Number of steps.
        stream: Data stream; sets the number of steps if the config leaves it open.
    """

    def __init__(self, config: JobScheduleConfig, stream: MicrobatchPackStream) -> None:
        total_steps = stream.total_steps if config.total_steps is None else config.total_steps
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
