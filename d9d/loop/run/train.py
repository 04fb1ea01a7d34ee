"""The training loop: the order of the calls of a step, and nothing else."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from d9d.core.dist_context import DistributedContext
from d9d.core.failures.watch import JobWatch, watching
from d9d.core.offload import DEFAULT_SLEEP_TAGS, SleepTag
from d9d.core.parent_watch import ends_with_torchrun
from d9d.core.protocol import LRSchedulerProtocol, OptimizerProtocol
from d9d.core.types import MicrobatchPack
from d9d.loop.component import (
    DevicePackStream,
    GradientClipper,
    GradientManager,
    JobLogger,
    JobProfiler,
    JobSchedule,
    LossSpikeDetector,
    ManualGarbageCollector,
    ModelStageExporter,
    PreemptionWatch,
    StateCheckpointer,
    TimeoutManager,
    TrackedModules,
    TrainSleeper,
    TrainTaskOperator,
    UpdateGuard,
)
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.control import FinalizeContext, TrainTask
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.common import EventFinishedContext, EventStepContext
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_FINISHED,
    EVENT_TRAIN_FORWARD_BACKWARD_POST,
    EVENT_TRAIN_FORWARD_BACKWARD_PRE,
    EVENT_TRAIN_OPTIMIZER_STEP_POST,
    EVENT_TRAIN_OPTIMIZER_STEP_PRE,
    EVENT_TRAIN_PREEMPTED,
    EVENT_TRAIN_READY,
    EVENT_TRAIN_RESUMED,
    EVENT_TRAIN_STEP_POST,
    EVENT_TRAIN_STEP_PRE,
    EventPreemptedContext,
    EventTrainReadyContext,
)
from d9d.loop.run.job_agreement import agree_on_resume
from d9d.loop.run.job_state import CheckpointedState
from d9d.model_state.io.save import BackgroundExport
from d9d.pipelining.failure import naming_failed_peers

# `Any` below: the types of batches, inputs and outputs are known to the job alone; the loop passes them on.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainJobState:
    """The components of a configured job, each built once with its collaborators."""

    dist_context: DistributedContext
    event_bus: EventBus
    task: TrainTask[Any, Any, Any, Any, Any]
    packs: DevicePackStream
    schedule: JobSchedule
    tracked_modules: TrackedModules
    task_operator: TrainTaskOperator[Any, Any, Any, Any, Any]
    gradient_manager: GradientManager
    gradient_clipper: GradientClipper
    update_guard: UpdateGuard
    optimizer: OptimizerProtocol
    lr_scheduler: LRSchedulerProtocol
    logger: JobLogger
    loss_spikes: LossSpikeDetector
    progress: TrainingProgress
    profiler: JobProfiler
    gc: ManualGarbageCollector
    timeouts: TimeoutManager
    checkpointer: StateCheckpointer
    checkpointed: CheckpointedState
    exporter: ModelStageExporter
    preemption: PreemptionWatch
    sleeper: TrainSleeper


class Trainer:
    """A configured training job."""

    def __init__(self, state: TrainJobState) -> None:
        """Take the components; use `TrainingConfigurator` to build them."""
        self._state = state

    def train(self) -> None:
        """Resume from the newest checkpoint of the run, if there is one, and train to the last step.

        All ranks must call it. A job that is complete already returns at once.

        Raises:
            RuntimeError: If the data ends before the last step, or ``gradient_manager`` ends the job by its config, or the
                job sleeps.
            PreemptedExit: After a checkpoint was saved, if a signal has told some rank to end.
        """
        self._state.sleeper.refuse_asleep("train()")
        with self._state.preemption.ending_process(), watching(self._state.dist_context) as watch:
            self._train(watch)
            self._state.checkpointer.end_count()

    def _train(self, watch: JobWatch) -> None:
        job = self._state
        has_resumed = job.checkpointer.load_last_checkpoint(job.checkpointed)
        agree_on_resume(job.dist_context, job.schedule.state_dict())
        if job.schedule.current_step >= job.schedule.total_steps:
            job.dist_context.logger.info("the job is complete: %d steps are done", job.schedule.current_step)
            return
        with contextlib.ExitStack() as ending, contextlib.ExitStack() as stack:
            stack.enter_context(ends_with_torchrun())
            writer = stack.enter_context(job.logger.new_run({}))
            stack.enter_context(job.logger.install())
            stack.enter_context(job.gradient_manager.install())
            stack.enter_context(job.gc)
            stack.enter_context(job.progress.open())
            profiler = stack.enter_context(job.profiler.open())
            packs = stack.enter_context(contextlib.closing(iter(job.packs)))
            stack.enter_context(job.checkpointer.open())
            stack.enter_context(watch.noting())
            stack.enter_context(naming_failed_peers(job.dist_context))
            step_context = EventStepContext(schedule=job.schedule)
            if has_resumed:
                job.event_bus.trigger(EVENT_TRAIN_RESUMED, step_context)
            job.event_bus.trigger(EVENT_TRAIN_READY, EventTrainReadyContext(writer=writer))
            while job.schedule.current_step < job.schedule.total_steps and not job.preemption.stops_job():
                self._step(packs, step_context)
                job.sleeper.refuse_asleep("the loop")
                job.checkpointer.checkpoint_if_needed(job.checkpointed)
                if profiler is not None:
                    profiler.step()
                job.progress.step()
            # Code of the user, saves in the background and writers of logs take the time that they need.
            ending.enter_context(job.dist_context.activity.inside("end of the job", None))
            self._finish()

    def _finish(self) -> None:
        """Come to the end of the job, or of what a signal has left of it."""
        job = self._state
        if job.schedule.current_step == job.schedule.total_steps:
            job.task.finalize(FinalizeContext())
            job.event_bus.trigger(EVENT_TRAIN_FINISHED, EventFinishedContext())
            return
        context = EventPreemptedContext(schedule=job.schedule, signal_name=job.preemption.signal_name)
        job.event_bus.trigger(EVENT_TRAIN_PREEMPTED, context)
        job.sleeper.refuse_asleep("the last checkpoint")
        job.checkpointer.checkpoint_before_exit(job.checkpointed)

    def _step(self, packs: Iterator[MicrobatchPack[Any]], context: EventStepContext) -> None:
        """Run one update of the parameters."""
        job, bus, activity = self._state, self._state.event_bus, self._state.dist_context.activity
        activity.step = job.schedule.step_in_progress
        bus.trigger(EVENT_TRAIN_STEP_PRE, context)
        activity.place = "reading data"
        pack = self._next_pack(packs)

        activity.place = "forward and backward passes"
        with bus.bounded(EVENT_TRAIN_FORWARD_BACKWARD_PRE, EVENT_TRAIN_FORWARD_BACKWARD_POST, context):
            job.sleeper.refuse_asleep("a step")
            job.task_operator.forward_backward(pack)

        activity.place = "summing gradients"
        job.logger.trigger_sync()
        job.gradient_manager.sync_and_scale()
        activity.place = "norm of gradients"
        grad_norm = job.gradient_clipper.clip()

        activity.place = "step of the optimizer"
        with bus.bounded(EVENT_TRAIN_OPTIMIZER_STEP_PRE, EVENT_TRAIN_OPTIMIZER_STEP_POST, context):
            if job.update_guard.allows_update(grad_norm):
                job.optimizer.step()

        activity.place = "logging"
        job.lr_scheduler.step()
        loss = job.gradient_manager.compute_global_loss()
        job.logger.log(loss=loss, grad_norm=grad_norm)
        job.loss_spikes.note(loss)
        job.gradient_manager.zero_grad()
        activity.place = "end of the step"
        job.gc.collect_periodic()
        job.timeouts.set_periodic()

        bus.trigger(EVENT_TRAIN_STEP_POST, context)
        job.schedule.step()

    def _next_pack(self, packs: Iterator[MicrobatchPack[Any]]) -> MicrobatchPack[Any]:
        try:
            return next(packs)
        except StopIteration:
            schedule = self._state.schedule
            raise RuntimeError(
                f"The data ended after step {schedule.current_step} of {schedule.total_steps}. Lower "
                f"schedule.total_steps, or let the data provider repeat its data."
            ) from None

    def sleep(self, tags: Iterable[SleepTag] = DEFAULT_SLEEP_TAGS) -> None:
        """Give up device memory, so that other work on the same devices can have it; see `TrainSleeper`.

        Before or after `train`, or in handlers of events between two steps, which must wake the job before they return to
        the loop. All ranks should call it, but none waits for another.

        Args:
            tags: What to give up.

        Raises:
            NotImplementedError: For communicators.
            RuntimeError: In the middle of a step.
        """
        self._state.sleeper.sleep(tags)

    def wake(self, tags: Iterable[SleepTag] = DEFAULT_SLEEP_TAGS) -> None:
        """Take back what `sleep` gave up, with the same values.

        Args:
            tags: What to take back; what is not given up is left out.
        """
        self._state.sleeper.wake(tags)

    def is_sleeping(self, tag: SleepTag) -> bool:
        """Tell whether something is given up."""
        return self._state.sleeper.is_sleeping(tag)

    def export(
        self,
        export_to: Path,
        load_checkpoint: bool,
        *,
        shard_size_gb: float = 4.0,
        dtype: torch.dtype | None = None,
        manifest: bool = False,
        in_background: bool = False,
    ) -> BackgroundExport | None:
        """Write the weights as a model state, through the mapper of ``prepare_export_model_stage``.

        All ranks must call it, and it blocks until all have. It fails on all ranks if it fails on one.

        Args:
            export_to: Folder of the model state, on a file system that all ranks share.
            load_checkpoint: Whether to export the newest checkpoint of the run instead of the weights as they are now. The
                job then is where that checkpoint was written.
            shard_size_gb: Largest size of a file in GB (10^9 bytes), but for one that holds a single larger tensor.
            dtype: What floating point tensors are converted to; None keeps each tensor's own.
            manifest: Whether to write hashes of the files too, which are verified when they are loaded.
            in_background: Whether to return when the weights are copied to the host, while threads write the files.

        Returns:
            With `in_background` the export, which all ranks must ``wait()`` for.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            NotImplementedError: If the model provider has no export.
            RuntimeError: If the job sleeps.
        """
        job = self._state
        job.sleeper.refuse_asleep("export()")
        if load_checkpoint and not job.checkpointer.load_last_checkpoint(job.checkpointed):
            raise FileNotFoundError(
                f"export: {job.checkpointer.save_dir} holds no checkpoint. Train with checkpointing.period_steps set, or "
                f"export the weights as they are now (load_checkpoint=False)."
            )
        return job.exporter.export(
            export_to, shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest, in_background=in_background
        )
