"""Values on their way from the device to the experiment tracker."""

import collections
import dataclasses

import torch

from d9d.core.device import HostCopy
from d9d.loop.component.job_schedule import JobSchedule
from d9d.tracker import BaseTrackerRun, Histogram, Scalar, TrackerPoint, TrackerValue

__all__ = ["PendingTrackerWrites", "TrackerWriter"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PendingWrite:
    point: TrackerPoint
    value: TrackerValue
    on_host: HostCopy | None
    """Copy of the tensor of `value`, if it has one."""

    def read(self) -> TrackerValue:
        """Return the value with its tensor on the host, waiting for its copy alone."""
        if self.on_host is None:
            return self.value
        tensor = self.on_host.read()
        return Histogram(counts=tensor) if isinstance(self.value, Histogram) else Scalar(value=float(tensor))


class PendingTrackerWrites:
    """Holds values until the host can read them without waiting for the device.

    Each tensor is copied to the host in the background when it is added, and read some steps later. On ranks without a
    tracker run, nothing is kept.

    Args:
        max_pending_steps: Steps that a value may wait; see `release`.
    """

    def __init__(self, max_pending_steps: int) -> None:
        self._max_pending_steps = max_pending_steps
        self._run: BaseTrackerRun | None = None
        self._writes: collections.deque[_PendingWrite] = collections.deque()
        self._newest: dict[str, _PendingWrite | None] = {}

    def attach(self, run: BaseTrackerRun | None) -> None:
        """Write to a run from now on. None: drop all values."""
        self._run = run

    def add(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Take a value, with whatever its tensor holds once the work that is queued so far is done."""
        if self._run is None:
            return
        tensor = value.counts if isinstance(value, Histogram) else value.value
        # The clone is of this moment in the queue: the caller may write into its tensor again right away.
        on_host = HostCopy(tensor.detach().clone()) if isinstance(tensor, torch.Tensor) else None
        write = _PendingWrite(point=point, value=value, on_host=on_host)
        self._writes.append(write)
        if isinstance(value, Scalar):
            self._newest[point.name] = write

    def take_newest(self, name: str) -> float | None:
        """Return the newest value of a scalar, or None if it was taken already, or nothing has been logged yet.

        Waits for the device if it has not computed the value.

        Raises:
            ValueError: If scalars have been logged, and none of that name.
        """
        if self._newest and name not in self._newest:
            raise ValueError(f"no value of the name {name!r} is logged; there are {', '.join(sorted(self._newest))}.")
        write = self._newest.get(name)
        if write is None:
            return None
        self._newest[name] = None
        value = write.read()
        assert isinstance(value, Scalar)  # nothing else is remembered
        return float(value.value)

    def release(self, step: int) -> dict[int, dict[str, float]]:
        """Write the values of steps that are `max_pending_steps` or more before a step.

        Returns:
            The scalars that were written, by step and name.
        """
        return self._write_until(step - self._max_pending_steps)

    def flush(self) -> dict[int, dict[str, float]]:
        """Write all values, waiting for the device if it has not computed them yet, and have the tracker hand them on."""
        written = self._write_until(None)
        if self._run is not None:
            self._run.flush()
        return written

    def _write_until(self, last_step: int | None) -> dict[int, dict[str, float]]:
        written: dict[int, dict[str, float]] = {}
        while self._writes and (last_step is None or self._writes[0].point.step <= last_step):
            write = self._writes.popleft()
            value = write.read()
            if isinstance(value, Scalar):
                written.setdefault(write.point.step, {})[write.point.name] = float(value.value)
            if self._run is not None:
                self._run.write(write.point, value)
        return written


class TrackerWriter:
    """Writes values of the step under way to the tracker run of the job.

    Can be used on every rank; only the main one writes. Tensors may be on the device: they are read some steps later.

    Args:
        pending: Where values wait.
        schedule: Position of the job.
        context: Labels that all values of this writer get.
    """

    def __init__(self, pending: PendingTrackerWrites, schedule: JobSchedule, context: dict[str, str]) -> None:
        self._pending = pending
        self._schedule = schedule
        self._context = context

    def log(self, name: str, value: TrackerValue, context: dict[str, str] | None = None) -> None:
        """Write one value.

        Args:
            name: Name of the series.
            value: A scalar or histogram. Its tensor must be the same on all ranks, or meant to be that of the main rank.
            context: Labels of this value, on top of those of the writer.
        """
        point = TrackerPoint(
            name=name, step=self._schedule.step_in_progress, context={**self._context, **(context or {})}
        )
        self._pending.add(point, value)
