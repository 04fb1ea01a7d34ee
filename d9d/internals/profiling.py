"""Traces of selected steps, one file per rank."""

import contextlib
import tarfile
import tempfile
from collections.abc import Generator
from pathlib import Path

from torch.profiler import profile, schedule, supported_activities

from d9d.core.dist_context import REGULAR_DOMAIN, DistributedContext

__all__ = ["Profiler"]


class Profiler:
    """Traces the last `active_steps` of each cycle of `period_steps`, on every rank.

    Traces are in Chrome's format, packed as `step_<n>/rank-<rank>-coord-<mesh coordinates>-trace.tar.gz`, n being the
    last step of the trace.

    Args:
        save_dir: Folder of traces.
        period_steps: Steps of a cycle.
        warmup_steps: Steps with the profiler on whose events are dropped.
        active_steps: Steps of a trace.
        record_shapes: Record input shapes of operators.
        with_stack: Record Python stacks of operators.
        dist_context: Topology of the job.
    """

    def __init__(
        self,
        save_dir: Path,
        period_steps: int,
        warmup_steps: int,
        active_steps: int,
        record_shapes: bool,
        with_stack: bool,
        dist_context: DistributedContext,
    ) -> None:
        self._save_dir = save_dir
        self._period_steps = period_steps
        self._warmup_steps = warmup_steps
        self._active_steps = active_steps
        self._record_shapes = record_shapes
        self._with_stack = with_stack
        self._dist_context = dist_context

    @contextlib.contextmanager
    def open(self, start_step: int) -> Generator[profile]:
        """Profile the block; the caller calls `step()` of the yielded profiler after each step.

        Args:
            start_step: Number of steps that are done already, for the numbers in file names.
        """
        cycle = schedule(
            wait=self._period_steps - self._warmup_steps - self._active_steps,
            warmup=self._warmup_steps,
            active=self._active_steps,
        )

        def write(profiler: profile) -> None:
            self._write_trace(profiler, start_step + profiler.step_num)

        with profile(
            activities=supported_activities(),
            schedule=cycle,
            on_trace_ready=write,
            record_shapes=self._record_shapes,
            with_stack=self._with_stack,
        ) as profiler:
            yield profiler

    def _write_trace(self, profiler: profile, step: int) -> None:
        name = f"rank-{self._dist_context.rank}-coord-{self._coordinates()}-trace"
        target = self._save_dir / f"step_{step}" / f"{name}.tar.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / f"{name}.json"
            profiler.export_chrome_trace(str(trace))
            with tarfile.open(target, "w:gz") as archive:
                archive.add(trace, arcname=trace.name)
        self._dist_context.logger.info("wrote the trace of step %d to %s", step, target)

    def _coordinates(self) -> str:
        if not self._dist_context.is_distributed:
            return "local"
        coordinates = self._dist_context.mesh_for(REGULAR_DOMAIN).get_coordinate()
        return "-".join(map(str, coordinates or ()))
