"""The profiler of a job."""

import contextlib
from collections.abc import Generator

import torch.profiler

from d9d.core.dist_context import DistributedContext
from d9d.internals.profiling import Profiler
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import ProfilingConfig

__all__ = ["JobProfiler"]


class JobProfiler:
    """Profiles the steps of a job that the config selects.

    Args:
        dist_context: Topology of the job.
        config: When to trace. None: never.
        schedule: Position of the job.
    """

    def __init__(self, dist_context: DistributedContext, config: ProfilingConfig | None, schedule: JobSchedule) -> None:
        self._schedule = schedule
        self._profiler = (
            None
            if config is None
            else Profiler(
                save_dir=config.traces_dir,
                period_steps=config.period_steps,
                warmup_steps=config.warmup_steps,
                active_steps=config.active_steps,
                record_shapes=config.record_shapes,
                with_stack=config.with_stack,
                dist_context=dist_context,
            )
        )

    @contextlib.contextmanager
    def open(self) -> Generator[torch.profiler.profile | None]:
        """Profile the block from the current step on; yields None if the job is not profiled."""
        if self._profiler is None:
            yield None
            return
        with self._profiler.open(self._schedule.current_step) as profiler:
            yield profiler
