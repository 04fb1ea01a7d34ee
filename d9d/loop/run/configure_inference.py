"""Build an inference job from its parts."""

from typing import Any

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.failures.error_file import recording_errors
from d9d.core.failures.watch import watching
from d9d.dataset.pack_stream import sample_count_of
from d9d.internals.determinism import set_step_seeds
from d9d.loop.component import (
    DataParallelMicrobatchPackStream,
    InferenceTaskOperator,
    JobProfiler,
    JobSchedule,
    ManualGarbageCollector,
    ModelStageFactory,
    PipelineStateHandler,
    StateCheckpointer,
    TimeoutManager,
    TrackedModules,
    build_device_pack_stream,
)
from d9d.loop.component.data_position import STREAM_KEY, restore_data_position
from d9d.loop.component.job_schedule import build_job_schedule
from d9d.loop.component.peer_agreement import PeerAgreement
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.component.run_checkpoints import RunCheckpoints
from d9d.loop.config import InferenceConfig, PipeliningConfig
from d9d.loop.control import (
    DataProvider,
    InferenceTask,
    InferenceTaskProvider,
    InferenceTaskProviderContext,
    InitializeDataProviderContext,
    ModelProvider,
    RegisterModelEventsContext,
    RegisterTaskEventsContext,
)
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.common import (
    EventConfigurationStartedContext,
    EventDataStreamReadyContext,
    EventModelStagesReadyContext,
)
from d9d.loop.event.catalogue.inference import (
    EVENT_INFERENCE_CONFIG_STARTED,
    EVENT_INFERENCE_DATA_STREAM_READY,
    EVENT_INFERENCE_MODEL_STAGES_READY,
    EVENT_INFERENCE_STEP_PRE,
)
from d9d.loop.run.inference import Inference, InferenceJobState, StepSync
from d9d.loop.run.job_start import start_job
from d9d.loop.run.job_state import CheckpointedState, RandomState, refuse_training_checkpoint
from d9d.pipelining.factory import PipelineScheduleInferenceConfig, PipelineScheduleInfo

# `Any` below: the types of batches, inputs and outputs are known to the job alone; the loop passes them on.


class InferenceConfigurator:
    """Builds an inference job from the parts that the user writes and two configs."""

    def __init__(
        self,
        mesh: DeviceMeshParameters,
        parameters: InferenceConfig,
        task_provider: InferenceTaskProvider,
        model_provider: ModelProvider[Any],
        data_provider: DataProvider,
    ) -> None:
        """Take the parts of the job.

        Args:
            mesh: Parallelism degrees.
            parameters: Steps, checkpointing and other settings of the loop.
            task_provider: Makes the task: model inputs, and what happens to outputs.
            model_provider: Builds, distributes and loads the model; the one of a training job will do.
            data_provider: Makes the stream of packs.
        """
        self._mesh = mesh
        self._config = parameters
        self._task_provider = task_provider
        self._model_provider = model_provider
        self._data_provider = data_provider

    def configure(self) -> Inference:
        """Build the job. All ranks must call it, and it blocks until all have.

        Raises:
            ValueError: With all problems of the configuration, before any process group exists.
        """
        with recording_errors():
            context, timeouts = start_job(self._mesh, self._config, self._model_provider, self._data_provider)
        with watching(context):
            return self._configure(context, timeouts)

    def _configure(self, context: DistributedContext, timeouts: TimeoutManager) -> Inference:
        bus = EventBus(context.activity)
        task = self._build_task(context, bus)
        bus.trigger(EVENT_INFERENCE_CONFIG_STARTED, EventConfigurationStartedContext(dist_context=context))
        stream = DataParallelMicrobatchPackStream(
            context, self._data_provider(InitializeDataProviderContext(dist_context=context))
        )
        checkpoints = RunCheckpoints(context, self._config.checkpointing, run_name=None)
        checkpoints.count_restart()
        restore_data_position(checkpoints, stream, refuse_training_checkpoint)
        bus.trigger(EVENT_INFERENCE_DATA_STREAM_READY, EventDataStreamReadyContext(stream=stream))
        schedule = build_job_schedule(context, self._config.schedule, stream)
        agreement = PeerAgreement(context, stream, schedule, self._config.data_agreement)
        bus.subscribe(EVENT_INFERENCE_STEP_PRE, agreement.check)
        pipeline, modules = self._build_stages(context, bus)
        return Inference(
            self._build_loop(context, bus, timeouts, task, stream, checkpoints, schedule, pipeline, modules)
        )

    def _build_task(self, context: DistributedContext, bus: EventBus) -> InferenceTask[Any, Any, Any, Any, Any]:
        task = self._task_provider(InferenceTaskProviderContext(dist_context=context))
        task.register_events(RegisterTaskEventsContext(dist_context=context, event_bus=bus))
        self._model_provider.register_events(RegisterModelEventsContext(dist_context=context, event_bus=bus))
        return task

    def _build_stages(
        self, context: DistributedContext, bus: EventBus
    ) -> tuple[PipelineScheduleInfo[Any, Any, Any], TrackedModules]:
        seed = self._config.determinism.base_seed
        pipelining = PipeliningConfig(schedule=PipelineScheduleInferenceConfig())
        pipeline, modules = ModelStageFactory(
            self._model_provider, context, self._config.model_stage_factory, pipelining, seed
        ).build_pipeline_and_modules()
        for module in modules.modules:
            module.eval()
        bus.trigger(EVENT_INFERENCE_MODEL_STAGES_READY, EventModelStagesReadyContext(modules=modules.modules))
        set_step_seeds(context, seed)
        return pipeline, modules

    def _build_loop(
        self,
        context: DistributedContext,
        bus: EventBus,
        timeouts: TimeoutManager,
        task: InferenceTask[Any, Any, Any, Any, Any],
        stream: DataParallelMicrobatchPackStream,
        checkpoints: RunCheckpoints,
        schedule: JobSchedule,
        pipeline: PipelineScheduleInfo[Any, Any, Any],
        modules: TrackedModules,
    ) -> InferenceJobState:
        config = self._config
        packs = build_device_pack_stream(stream, context.current_device, config.data_prefetch.prefetch_factor)
        gc = ManualGarbageCollector(context, config.gc, schedule)
        return InferenceJobState(
            dist_context=context,
            event_bus=bus,
            task=task,
            packs=packs,
            schedule=schedule,
            step_sync=StepSync(context, modules.modules),
            task_operator=InferenceTaskOperator(context, task, pipeline, PipelineStateHandler()),
            progress=TrainingProgress(context, schedule, sample_count_of(stream)),
            profiler=JobProfiler(context, config.profiling, schedule),
            gc=gc,
            timeouts=timeouts,
            checkpointer=StateCheckpointer(
                context, schedule, config.checkpointing, gc, run_name=None, checkpoints=checkpoints
            ),
            checkpointed=CheckpointedState(
                dist_context=context,
                parts={"schedule": schedule, STREAM_KEY: packs, "task": task},
                parts_of_rank={"random": RandomState(context.current_device)},
                saved_elsewhere=() if pipeline.has_last_stage else ("task",),
            ),
        )
