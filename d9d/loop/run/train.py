"""Configure and run a training job."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.protocol import LRSchedulerProtocol, OptimizerProtocol
from d9d.core.types import MicrobatchPack
from d9d.internals.determinism import set_seeds, set_step_seeds
from d9d.loop.component import (
    DataParallelMicrobatchPackStream,
    DevicePackStream,
    GradientClipper,
    GradientManager,
    JobLogger,
    JobProfiler,
    JobSchedule,
    ManualGarbageCollector,
    ModelStageFactory,
    OptimizerFactory,
    PipelineStateHandler,
    StateCheckpointer,
    TimeoutManager,
    TrackedModules,
    TrainTaskOperator,
    build_device_pack_stream,
)
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.config import TrainerConfig
from d9d.loop.control import (
    CreateMetricsContext,
    DataProvider,
    FinalizeContext,
    InitializeDataProviderContext,
    LRSchedulerProvider,
    ModelProvider,
    OptimizerProvider,
    RegisterModelEventsContext,
    RegisterTaskEventsContext,
    TrainTask,
    TrainTaskProvider,
    TrainTaskProviderContext,
)
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.common import (
    EventConfigurationStartedContext,
    EventDataStreamReadyContext,
    EventFinishedContext,
    EventModelStagesReadyContext,
    EventStepContext,
)
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_CONFIG_STARTED,
    EVENT_TRAIN_DATA_STREAM_READY,
    EVENT_TRAIN_FINISHED,
    EVENT_TRAIN_FORWARD_BACKWARD_POST,
    EVENT_TRAIN_FORWARD_BACKWARD_PRE,
    EVENT_TRAIN_LR_SCHEDULER_READY,
    EVENT_TRAIN_MODEL_STAGES_READY,
    EVENT_TRAIN_OPTIMIZER_READY,
    EVENT_TRAIN_OPTIMIZER_STEP_POST,
    EVENT_TRAIN_OPTIMIZER_STEP_PRE,
    EVENT_TRAIN_READY,
    EVENT_TRAIN_STEP_POST,
    EVENT_TRAIN_STEP_PRE,
    EventLRSchedulerReadyContext,
    EventOptimizerReadyContext,
    EventTrainReadyContext,
)
from d9d.loop.run.job_state import CheckpointedState
from d9d.metric.impl.container import ComposeMetric

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
    optimizer: OptimizerProtocol
    lr_scheduler: LRSchedulerProtocol
    logger: JobLogger
    progress: TrainingProgress
    profiler: JobProfiler
    gc: ManualGarbageCollector
    timeouts: TimeoutManager
    checkpointer: StateCheckpointer
    checkpointed: CheckpointedState


class Trainer:
    """A configured training job."""

    def __init__(self, state: TrainJobState) -> None:
        """Take the components; use `TrainingConfigurator` to build them."""
        self._state = state

    def train(self) -> None:
        """Resume from the newest checkpoint of the run, if there is one, and train to the last step.

        All ranks must call it. A job that is complete already returns at once.

        Raises:
            RuntimeError: If the data ends before the last step.
        """
        job = self._state
        job.checkpointer.load_last_checkpoint(job.checkpointed)
        if job.schedule.current_step >= job.schedule.total_steps:
            job.dist_context.logger.info("the job is complete: %d steps are done", job.schedule.current_step)
            return
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(job.logger.new_run({}))
            stack.enter_context(job.logger.install())
            stack.enter_context(job.gradient_manager.install())
            stack.enter_context(job.gc)
            stack.enter_context(job.progress.open())
            profiler = stack.enter_context(job.profiler.open())
            packs = stack.enter_context(contextlib.closing(iter(job.packs)))
            job.event_bus.trigger(EVENT_TRAIN_READY, EventTrainReadyContext(writer=writer))
            step_context = EventStepContext(schedule=job.schedule)
            while job.schedule.current_step < job.schedule.total_steps:
                self._step(packs, step_context)
                job.checkpointer.checkpoint_if_needed(job.checkpointed)
                if profiler is not None:
                    profiler.step()
                job.progress.step()
            job.task.finalize(FinalizeContext())
            job.event_bus.trigger(EVENT_TRAIN_FINISHED, EventFinishedContext())

    def _step(self, packs: Iterator[MicrobatchPack[Any]], context: EventStepContext) -> None:
        """Run one update of the parameters."""
        job, bus = self._state, self._state.event_bus
        bus.trigger(EVENT_TRAIN_STEP_PRE, context)
        pack = self._next_pack(packs)

        with bus.bounded(EVENT_TRAIN_FORWARD_BACKWARD_PRE, EVENT_TRAIN_FORWARD_BACKWARD_POST, context):
            job.task_operator.forward_backward(pack)

        job.logger.trigger_sync()
        job.gradient_manager.sync_and_scale()
        grad_norm = job.gradient_clipper.clip()

        with bus.bounded(EVENT_TRAIN_OPTIMIZER_STEP_PRE, EVENT_TRAIN_OPTIMIZER_STEP_POST, context):
            if job.gradient_manager.should_update():
                job.optimizer.step()

        job.lr_scheduler.step()
        job.logger.log(loss=job.gradient_manager.compute_global_loss(), grad_norm=grad_norm)
        job.gradient_manager.zero_grad()
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

    def export(self, export_to: Path, load_checkpoint: bool) -> None:
        """Write the weights as a model state. Not available yet.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("Trainer.export arrives with model state I/O in a later release.")


class TrainingConfigurator:
    """Builds a training job from the parts that the user writes and two configs."""

    def __init__(
        self,
        mesh: DeviceMeshParameters,
        parameters: TrainerConfig,
        task_provider: TrainTaskProvider,
        model_provider: ModelProvider[Any],
        data_provider: DataProvider,
        optimizer_provider: OptimizerProvider,
        lr_scheduler_provider: LRSchedulerProvider,
    ) -> None:
        """Take the parts of the job.

        Args:
            mesh: Parallelism degrees.
            parameters: Steps, checkpointing, logging and other settings of the loop.
            task_provider: Makes the task: model inputs, loss and metrics.
            model_provider: Builds, distributes, loads and exports the model.
            data_provider: Makes the stream of packs.
            optimizer_provider: Makes the optimizer of a stage.
            lr_scheduler_provider: Makes the learning rate schedule of an optimizer.
        """
        self._mesh = mesh
        self._config = parameters
        self._task_provider = task_provider
        self._model_provider = model_provider
        self._data_provider = data_provider
        self._optimizer_provider = optimizer_provider
        self._lr_scheduler_provider = lr_scheduler_provider

    def configure(self) -> Trainer:
        """Build the job. All ranks must call it, and it blocks until all have."""
        config, bus = self._config, EventBus()
        context = self._mesh.build()
        set_seeds(context, config.determinism.base_seed)
        timeouts = TimeoutManager(context, config.timeout)
        timeouts.set_init()
        task = self._task_provider(TrainTaskProviderContext(dist_context=context))
        task.register_events(RegisterTaskEventsContext(dist_context=context, event_bus=bus))
        self._model_provider.register_events(RegisterModelEventsContext(dist_context=context, event_bus=bus))
        bus.trigger(EVENT_TRAIN_CONFIG_STARTED, EventConfigurationStartedContext(dist_context=context))

        stream = DataParallelMicrobatchPackStream(
            context, self._data_provider(InitializeDataProviderContext(dist_context=context))
        )
        bus.trigger(EVENT_TRAIN_DATA_STREAM_READY, EventDataStreamReadyContext(stream=stream))
        packs = build_device_pack_stream(stream, context.current_device, config.data_prefetch.prefetch_factor)
        schedule = JobSchedule(config.schedule, stream)

        pipeline, modules = ModelStageFactory(
            self._model_provider, context, config.model_stage_factory, config.pipelining, config.determinism.base_seed
        ).build_pipeline_and_modules()
        bus.trigger(EVENT_TRAIN_MODEL_STAGES_READY, EventModelStagesReadyContext(modules=modules.modules))
        set_step_seeds(context, config.determinism.base_seed)

        metrics = ComposeMetric(task.create_metrics(CreateMetricsContext()).metrics)
        metrics.to(context.current_device)
        gradient_manager = GradientManager(context, modules, config.gradient_manager)
        optimizer, lr_scheduler = OptimizerFactory(
            context, modules, self._optimizer_provider, self._lr_scheduler_provider, schedule
        ).build_optimizer_and_scheduler()
        bus.trigger(EVENT_TRAIN_OPTIMIZER_READY, EventOptimizerReadyContext(optimizer=optimizer))
        bus.trigger(EVENT_TRAIN_LR_SCHEDULER_READY, EventLRSchedulerReadyContext(lr_scheduler=lr_scheduler))

        gc = ManualGarbageCollector(context, config.gc, schedule)
        progress = TrainingProgress(context, schedule)
        hparams = {**task.dump_hparams(), **self._model_provider.dump_hparams()}
        logger = JobLogger(context, config.logging, metrics, schedule, config.run, hparams, progress)
        parts = {
            "schedule": schedule,
            "tracked_modules": modules,
            "microbatch_pack_stream": packs,
            "logger": logger,
            "task": task,
            "metrics": metrics,
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
        }
        return Trainer(
            TrainJobState(
                dist_context=context,
                event_bus=bus,
                task=task,
                packs=packs,
                schedule=schedule,
                tracked_modules=modules,
                task_operator=TrainTaskOperator(
                    context, task, pipeline, PipelineStateHandler(), gradient_manager, schedule, metrics
                ),
                gradient_manager=gradient_manager,
                gradient_clipper=GradientClipper(context, gradient_manager, config.gradient_clipping),
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                logger=logger,
                progress=progress,
                profiler=JobProfiler(context, config.profiling, schedule),
                gc=gc,
                timeouts=timeouts,
                checkpointer=StateCheckpointer(context, schedule, config.checkpointing, gc, config.run.name),
                checkpointed=CheckpointedState(dist_context=context, parts=parts),
            )
        )
