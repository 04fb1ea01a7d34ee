"""What the person in front of the job sees of it."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import NoReturn

from tqdm import tqdm

from d9d.core.dist_context import DistributedContext
from d9d.loop.component.job_schedule import JobSchedule

__all__ = ["TrainingProgress"]

_SHOWN_VALUES = {"loss": "loss", "l2_grad_norm_total": "grad norm"}
"""Labels of the logged values that are shown, by the name they are logged under."""

_LINE_PERIOD_S = 10.0
"""Seconds between two lines where there is no terminal: enough to see that a job is alive, little in a log file."""


class TrainingProgress:
    """Shows step, loss, gradient norm and speed on the main rank.

    On a terminal this is a bar. Elsewhere it is a plain line in the log now and then. Values are those that the logger has
    read from the device anyway, so showing them never waits for it.

    Args:
        dist_context: Topology of the job.
        schedule: Position of the job.
        num_samples_of: Tells the samples of the first steps of the run over all ranks, whose batches may grow. None: speed
            is shown in steps.
        is_terminal: Draw a bar. Default: whether standard error is a terminal.
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        schedule: JobSchedule,
        num_samples_of: Callable[[int], int] | None = None,
        is_terminal: bool | None = None,
    ) -> None:
        self._logger = dist_context.logger
        self._is_main_process = dist_context.is_main_process
        self._schedule = schedule
        self._num_samples_of = num_samples_of
        self._is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._bar: tqdm[NoReturn] | None = None
        self._started_at_s = 0.0
        self._started_at_step = 0
        self._last_line_s = 0.0

    @contextlib.contextmanager
    def open(self) -> Generator[None]:
        """Show progress while the block runs, from the current step of the schedule on."""
        self._started_at_s = self._last_line_s = time.monotonic()
        self._started_at_step = self._schedule.current_step
        if self._is_main_process and self._is_terminal:
            self._bar = tqdm(
                total=self._schedule.total_steps, initial=self._schedule.current_step, unit="step", dynamic_ncols=True
            )
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def step(self) -> None:
        """Count one step, after the schedule has."""
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show values of a step.

        Args:
            step: Number of the step, from 1.
            values: Logged values by name; those that are not loss or gradient norm are ignored.
        """
        if not self._is_main_process:
            return
        shown = {label: f"{values[name]:.4g}" for name, label in _SHOWN_VALUES.items() if name in values}
        if self._bar is not None:
            if self._num_samples_of is not None:
                shown["samples/s"] = f"{self._per_second(self._num_samples_of):.4g}"
            self._bar.set_postfix(shown, refresh=False)
            return
        self._write_line(step, shown)

    def _write_line(self, step: int, shown: Mapping[str, str]) -> None:
        now_s = time.monotonic()
        is_last = step == self._schedule.total_steps
        if now_s - self._last_line_s < _LINE_PERIOD_S and not is_last:
            return
        self._last_line_s = now_s
        values = "".join(f" | {label} {value}" for label, value in shown.items())
        self._logger.info("step %d/%d%s | %s", step, self._schedule.total_steps, values, self._speed())

    def _speed(self) -> str:
        if self._num_samples_of is None:
            return f"{self._per_second(lambda num_steps: num_steps):.4g} steps/s"
        return f"{self._per_second(self._num_samples_of):.4g} samples/s"

    def _per_second(self, count_of: Callable[[int], int]) -> float:
        """Return the mean rate since `open` of what the first steps of the run count."""
        elapsed_s = time.monotonic() - self._started_at_s
        count = count_of(self._schedule.current_step) - count_of(self._started_at_step)
        return count / elapsed_s if elapsed_s > 0 else 0.0
