"""Python's cycle collector, run when all ranks can afford it together."""

import gc
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from d9d.core.dist_context import DistributedContext
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import GarbageCollectionConfig, StepActionSpecial

__all__ = ["ManualGarbageCollector"]

_YOUNG_GENERATIONS = 1
_ALL_GENERATIONS = 2


class ManualGarbageCollector(AbstractContextManager["ManualGarbageCollector"]):
    """Keeps Python from collecting cycles at a moment of its own choice, where one slow rank would hold up all others.

    Inside the context, automatic collection is off. Leaving it, also by an exception, restores what was before. With the
    period `disable` nothing would ever be collected, so Python's own collector stays on.

    Args:
        dist_context: Topology of the job.
        config: When to collect.
        schedule: Position of the job.
    """

    def __init__(
        self, dist_context: DistributedContext, config: GarbageCollectionConfig, schedule: JobSchedule
    ) -> None:
        self._logger = dist_context.logger
        self._period = config.period_steps
        self._schedule = schedule
        self._was_enabled = False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self._period is not StepActionSpecial.disable:
            # What was built so far is long-lived; cycles among it are collected once, now.
            gc.collect(_ALL_GENERATIONS)
            gc.disable()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._was_enabled:
            gc.enable()

    def collect_periodic(self) -> None:
        """Collect the young generations if this step is one that the config selects."""
        if self._schedule.should_do_action(self._period):
            num_objects = gc.collect(_YOUNG_GENERATIONS)
            self._logger.debug(
                "garbage collection at step %d: %d objects", self._schedule.step_in_progress, num_objects
            )

    def collect_forced(self) -> None:
        """Collect all generations now, to free memory before something large is allocated."""
        gc.collect(_ALL_GENERATIONS)
