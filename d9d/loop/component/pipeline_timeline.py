"""Measure what each pipeline rank does in one step, and draw it."""

import contextlib
from collections.abc import Generator

from d9d.core.dist_context import DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import PipelineTimelineConfig
from d9d.pipelining.api import ActionTiming, AnyPipelineSchedule
from d9d.pipelining.timeline import TimelineEvent
from d9d.pipelining.visualize import read_measured_timeline, write_measured_timeline, write_timeline

__all__ = ["PipelineTimelineRecorder"]


class PipelineTimelineRecorder:
    """Records the step that the config names; the other steps run as ever."""

    def __init__(
        self,
        dist_context: DistributedContext,
        config: PipelineTimelineConfig | None,
        schedule: JobSchedule,
        pipeline: AnyPipelineSchedule,
    ) -> None:
        """Connect with the job.

        Args:
            dist_context: Topology of the job.
            config: What to record. None: nothing.
            schedule: Position of the job.
            pipeline: What runs the packs.
        """
        self._dist_context = dist_context
        self._config = config
        self._schedule = schedule
        self._pipeline = pipeline

    @contextlib.contextmanager
    def watch_step(self) -> Generator[None]:
        """Record the block if it is the chosen step. All ranks must enter it, and rank 0 writes the files."""
        config = self._config
        if config is None or self._schedule.current_step + 1 != config.step:
            yield
            return
        # The clocks of the ranks start together.
        self._dist_context.wait_world()
        self._pipeline.record_next_step()
        yield
        by_rank = self._gather(self._pipeline.take_timings())
        if self._dist_context.is_main_process:
            events = {rank: [TimelineEvent(*timing) for timing in timings] for rank, timings in enumerate(by_rank)}
            measurements = config.path.with_suffix(".json")
            config.path.parent.mkdir(parents=True, exist_ok=True)
            write_measured_timeline(events, measurements)
            write_timeline(
                read_measured_timeline(measurements), config.path, title=f"Step {config.step}, measured", unit="s"
            )
            self._dist_context.logger.info("wrote the timeline of step %d to %s", config.step, config.path)

    def _gather(self, own: list[ActionTiming]) -> list[list[ActionTiming]]:
        if not self._dist_context.mesh_params.has_pipeline_parallel:
            return [own]
        return all_gather_object(own, self._dist_context.pipeline_group)
