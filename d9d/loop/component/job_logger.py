"""Loss, gradient norm and metrics of a job on their way to the experiment tracker."""

import contextlib
from collections.abc import Generator, Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import DistributedContext
from d9d.core.pytree import tree_leaves_with_path
from d9d.core.types import PyTree, ScalarTree
from d9d.internals.metric_collector import AsyncMetricCollector
from d9d.internals.state import load_state_dict_main_process, state_dict_main_process
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.component.tracker_writer import PendingTrackerWrites, TrackerWriter
from d9d.loop.config import JobLoggerConfig
from d9d.metric.impl.container import ComposeMetric
from d9d.tracker import BaseTracker, RunConfig, Scalar, tracker_from_config

__all__ = ["JobLogger"]

_LOSS = "loss"
_GRAD_NORM = "l2_grad_norm_total"


class JobLogger(Stateful):
    """Writes the loss, the gradient norm and the metrics of selected steps.

    [Note: logging without waiting for the device]
    `trigger_sync` starts the reduction of the metrics over ranks, beside the gradient sync. `log` starts copies of the
    results to the host, and reads those that were started some steps ago. So a step never waits for its own values.

    The tracker exists on the main rank only. All ranks must call `trigger_sync` and `log` at each step, since metrics are
    reduced over all of them.

    Args:
        dist_context: Topology of the job.
        config: When and where to write.
        metrics: Metrics of the job. They start anew after each step that is logged.
        schedule: Position of the job.
        run_config: Name and hyperparameters of the run.
        additional_hparams: Hyperparameters of task and model; those of `run_config` go before them.
        progress: Shows the values that were read.
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        config: JobLoggerConfig,
        metrics: ComposeMetric,
        schedule: JobSchedule,
        run_config: RunConfig,
        additional_hparams: ScalarTree,
        progress: TrainingProgress | None = None,
    ) -> None:
        self._dist_context = dist_context
        self._period = config.period_steps
        self._collector = AsyncMetricCollector(metrics)
        self._schedule = schedule
        self._run_config = _with_hparams(run_config, additional_hparams)
        self._progress = progress
        self._pending = PendingTrackerWrites(config.max_pending_steps)
        # `Any`: each tracker has a config type of its own, which does not matter from here on.
        self._tracker: BaseTracker[Any] | None = (
            tracker_from_config(config.tracker) if dist_context.is_main_process else None
        )
        self._writer: TrackerWriter | None = None

    @contextlib.contextmanager
    def new_run(self, context: dict[str, str]) -> Generator[TrackerWriter]:
        """Open a run of the tracker for the block, or go on with the one whose state was loaded.

        When the block ends, also by an exception, all values that were logged are written.

        Args:
            context: Labels of all values of the run.
        """
        with contextlib.ExitStack() as stack:
            if self._tracker is not None:
                self._pending.attach(stack.enter_context(self._tracker.open(self._run_config)))
            stack.callback(self._end_run)
            self._writer = TrackerWriter(self._pending, self._schedule, context)
            yield self._writer

    def _end_run(self) -> None:
        try:
            self.flush()
        finally:
            self._pending.attach(None)
            self._writer = None

    @contextlib.contextmanager
    def install(self) -> Generator[None]:
        """Make metrics ready to be collected while the block runs."""
        self._collector.bind()
        try:
            yield
        finally:
            self._collector.unbind()

    def trigger_sync(self) -> None:
        """Start to reduce the metrics over ranks, if this step is logged. Does not block the host."""
        if self._is_due():
            self._collector.schedule_collection(self._dist_context)

    def log(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Log this step if the config selects it, and write what was logged some steps ago.

        Args:
            loss: Loss of the step over all ranks, one value on the device.
            grad_norm: Gradient norm of the step before clipping, one value on the device.

        Raises:
            RuntimeError: No run is open.
        """
        if self._writer is None:
            raise RuntimeError("log() needs an open run: call it inside new_run().")
        if self._is_due():
            self._writer.log(_LOSS, Scalar(value=loss))
            self._writer.log(_GRAD_NORM, Scalar(value=grad_norm))
            for name, value in _named_scalars(self._collector.collect_results()):
                self._writer.log(name, Scalar(value=value))
        self._show(self._pending.release(self._schedule.step_in_progress))

    def flush(self) -> None:
        """Write all that was logged so far, so that nothing that happens to this process can lose it. Waits for the device."""
        self._show(self._pending.flush())

    def take_newest(self, name: str) -> float | None:
        """Return the newest value of a name, once, on the main rank. See `PendingTrackerWrites.take_newest`."""
        return self._pending.take_newest(name)

    def _is_due(self) -> bool:
        return self._schedule.should_do_action(self._period, enable_on_last_step_if_periodic=True)

    def _show(self, values_by_step: Mapping[int, Mapping[str, float]]) -> None:
        if self._progress is not None:
            for step, values in values_by_step.items():
                self._progress.show(step, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the tracker, on the main rank."""
        return {"tracker": {} if self._tracker is None else state_dict_main_process(self._dist_context, self._tracker)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next `new_run` go on with the run that was saved."""
        if self._tracker is not None:
            load_state_dict_main_process(self._dist_context, self._tracker, state_dict["tracker"])


def _with_hparams(run_config: RunConfig, additional: ScalarTree) -> RunConfig:
    if not isinstance(additional, Mapping):
        raise TypeError(f"dump_hparams() must return a dict, got {type(additional).__name__}.")
    named = cast("Mapping[str, Any]", additional)
    return run_config.model_copy(update={"hparams": {**named, **run_config.hparams}})


def _named_scalars(results: PyTree[torch.Tensor]) -> list[tuple[str, torch.Tensor | float]]:
    """Name each value of nested metric results by its path, and each element of a vector by its index."""
    named: list[tuple[str, torch.Tensor | float]] = []
    for path, value in tree_leaves_with_path(results):
        name = "/".join(map(str, path))
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            named.extend((f"{name}/{index}", element) for index, element in enumerate(value.flatten().unbind()))
        else:
            named.append((name, value))
    return named
