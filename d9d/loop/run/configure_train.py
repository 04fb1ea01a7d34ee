"""Build a training job from its parts."""

from collections.abc import Mapping
from typing import Any, cast

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.failures.error_file import recording_errors
from d9d.core.failures.watch import watching
from d9d.core.types import ScalarTree
from d9d.dataset.pack_stream import sample_count_of
from d9d.internals.determinism import set_step_seeds
from d9d.loop.component import (
    DataParallelMicrobatchPackStream,
    GradientClipper,
    GradientManager,
    JobLogger,
    JobProfiler,
    JobSchedule,
    LossSpikeDetector,
    ManualGarbageCollector,
    ModelStageExporter,
    ModelStageFactory,
    OptimizerFactory,
    PipelineStateHandler,
    PreemptionWatch,
    StateCheckpointer,
    TimeoutManager,
    TrackedModules,
    TrainSleeper,
    TrainTaskOperator,
    UpdateGuard,
    build_device_pack_stream,
)
from d9d.loop.component.data_position import STREAM_KEY, restore_data_position
from d9d.loop.component.job_schedule import build_job_schedule
from d9d.loop.component.peer_agreement import PeerAgreement
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.component.run_checkpoints import RunCheckpoints
from d9d.loop.component.trained_state import TrainedState
from d9d.loop.config import TrainerConfig
from d9d.loop.control import (
    CreateMetricsContext,
    DataProvider,
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
    EventModelStagesReadyContext,
)
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_CONFIG_STARTED,
    EVENT_TRAIN_DATA_STREAM_READY,
    EVENT_TRAIN_LR_SCHEDULER_READY,
    EVENT_TRAIN_MODEL_STAGES_READY,
    EVENT_TRAIN_OPTIMIZER_READY,
    EVENT_TRAIN_STEP_PRE,
    EventLRSchedulerReadyContext,
    EventOptimizerReadyContext,
)
from d9d.loop.run.job_agreement import agree_on_data, agree_on_parts
from d9d.loop.run.job_start import start_job
from d9d.loop.run.job_state import CheckpointedState, RandomState
from d9d.loop.run.train import Trainer, TrainJobState
from d9d.metric.impl.container import ComposeMetric
from d9d.pipelining.factory import PipelineScheduleInfo

# `Any` below: the types of batches, inputs and outputs are known to the job alone; the loop passes them on.


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
        """Build the job. All ranks must call it, and it blocks until all have.

        Raises:
            ValueError: With all problems of the configuration, before any process group exists.
        """
        with recording_errors():
            context, timeouts = start_job(self._mesh, self._config, self._model_provider, self._data_provider)
        with watching(context):
            return self._configure(context, timeouts)

    def _configure(self, context: DistributedContext, timeouts: TimeoutManager) -> Trainer:
        bus = EventBus(context.activity)
        task = self._build_task(context, bus)
        bus.trigger(EVENT_TRAIN_CONFIG_STARTED, EventConfigurationStartedContext(dist_context=context))
        stream = DataParallelMicrobatchPackStream(
            context, self._data_provider(InitializeDataProviderContext(dist_context=context))
        )
        checkpoints = RunCheckpoints(context, self._config.checkpointing, self._config.run.name)
        checkpoints.count_restart()
        restore_data_position(checkpoints, stream, refuse=lambda keys: None)
        bus.trigger(EVENT_TRAIN_DATA_STREAM_READY, EventDataStreamReadyContext(stream=stream))
        schedule = build_job_schedule(context, self._config.schedule, stream)
        agree_on_data(context, stream)
        agreement = PeerAgreement(context, stream, schedule, self._config.data_agreement)
        bus.subscribe(EVENT_TRAIN_STEP_PRE, agreement.check)
        pipeline, modules = self._build_stages(context, bus)
        return Trainer(self._build_loop(context, bus, timeouts, task, stream, checkpoints, schedule, pipeline, modules))

    def _build_task(self, context: DistributedContext, bus: EventBus) -> TrainTask[Any, Any, Any, Any, Any]:
        task = self._task_provider(TrainTaskProviderContext(dist_context=context))
        task.register_events(RegisterTaskEventsContext(dist_context=context, event_bus=bus))
        self._model_provider.register_events(RegisterModelEventsContext(dist_context=context, event_bus=bus))
        return task

    def _build_stages(
        self, context: DistributedContext, bus: EventBus
    ) -> tuple[PipelineScheduleInfo[Any, Any, Any], TrackedModules]:
        seed = self._config.determinism.base_seed
        pipeline, modules = ModelStageFactory(
            self._model_provider, context, self._config.model_stage_factory, self._config.pipelining, seed
        ).build_pipeline_and_modules()
        bus.trigger(EVENT_TRAIN_MODEL_STAGES_READY, EventModelStagesReadyContext(modules=modules.modules))
        set_step_seeds(context, seed)
        return pipeline, modules

    def _build_loop(
        self,
        context: DistributedContext,
        bus: EventBus,
        timeouts: TimeoutManager,
        task: TrainTask[Any, Any, Any, Any, Any],
        stream: DataParallelMicrobatchPackStream,
        checkpoints: RunCheckpoints,
        schedule: JobSchedule,
        pipeline: PipelineScheduleInfo[Any, Any, Any],
        modules: TrackedModules,
    ) -> TrainJobState:
        config, saving = self._config, self._config.checkpointing
        packs = build_device_pack_stream(stream, context.current_device, config.data_prefetch.prefetch_factor)
        metrics = ComposeMetric(task.create_metrics(CreateMetricsContext()).metrics)
        metrics.to(context.current_device)
        gradient_manager = GradientManager(context, modules, config.gradient_manager)
        optimizer, lr_scheduler = OptimizerFactory(
            context, modules, self._optimizer_provider, self._lr_scheduler_provider, schedule
        ).build_optimizer_and_scheduler()
        bus.trigger(EVENT_TRAIN_OPTIMIZER_READY, EventOptimizerReadyContext(optimizer=optimizer))
        bus.trigger(EVENT_TRAIN_LR_SCHEDULER_READY, EventLRSchedulerReadyContext(lr_scheduler=lr_scheduler))
        gc = ManualGarbageCollector(context, config.gc, schedule)
        progress = TrainingProgress(context, schedule, sample_count_of(stream))
        hparams = _merged(task.dump_hparams(), self._model_provider.dump_hparams())
        agree_on_parts(context, metrics, hparams)
        logger = JobLogger(context, config.logging, metrics, schedule, config.run, hparams, progress)
        parts: dict[str, Any] = {"schedule": schedule, STREAM_KEY: packs, "logger": logger, "task": task}
        parts_of_rank = {"metrics": metrics, "random": RandomState(context.current_device)}
        return TrainJobState(
            dist_context=context,
            event_bus=bus,
            task=task,
            packs=packs,
            schedule=schedule,
            tracked_modules=modules,
            task_operator=TrainTaskOperator(
                context,
                task,
                pipeline,
                PipelineStateHandler(),
                gradient_manager,
                schedule,
                metrics,
                config.pipelining.timeline,
            ),
            gradient_manager=gradient_manager,
            gradient_clipper=GradientClipper(context, gradient_manager, config.gradient_clipping),
            update_guard=UpdateGuard(context, config.gradient_manager, gradient_manager, schedule, bus),
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            logger=logger,
            loss_spikes=LossSpikeDetector(config.loss_spike, schedule, bus),
            progress=progress,
            profiler=JobProfiler(context, config.profiling, schedule),
            gc=gc,
            timeouts=timeouts,
            checkpointer=StateCheckpointer(
                context, schedule, saving, gc, config.run.name, checkpoints, logger.take_newest, logger.flush
            ),
            checkpointed=CheckpointedState(
                dist_context=context,
                parts=parts,
                parts_of_rank=parts_of_rank,
                trained=TrainedState.of_job(
                    context,
                    modules,
                    optimizer,
                    lr_scheduler,
                    pipeline.stages_by_rank,
                    saving.on_changed_parameters,
                ),
                saved_elsewhere=() if pipeline.has_last_stage else ("task",),
            ),
            preemption=PreemptionWatch(context, config.preemption),
            exporter=ModelStageExporter(self._model_provider, modules, context),
            sleeper=TrainSleeper(context, modules, optimizer, gradient_manager, bus),
        )


def _merged(*trees: ScalarTree) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for tree in trees:
        if not isinstance(tree, Mapping):
            raise TypeError(f"dump_hparams() must return a dict, got {type(tree).__name__}.")
        merged.update(cast("Mapping[str, Any]", tree))
    return merged
