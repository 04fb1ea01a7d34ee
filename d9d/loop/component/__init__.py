"""The parts that a loop is made of. Each gets its collaborators through its constructor."""

from d9d.loop.component.checkpointer import StateCheckpointer
from d9d.loop.component.data_stream import (
    DataParallelMicrobatchPackStream,
    DevicePackStream,
    DirectDevicePackStream,
    PrefetchingDevicePackStream,
    build_device_pack_stream,
)
from d9d.loop.component.garbage_collector import ManualGarbageCollector
from d9d.loop.component.gradient_clipper import GradientClipper
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.inference_operator import InferenceTaskOperator
from d9d.loop.component.job_logger import JobLogger
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.loss_spikes import LossSpikeDetector
from d9d.loop.component.model_stage import ModelStageFactory
from d9d.loop.component.model_states import ModelStageExporter
from d9d.loop.component.nonfinite import UpdateGuard
from d9d.loop.component.optimizer_factory import OptimizerFactory
from d9d.loop.component.pipeline_state import PipelineStateHandler
from d9d.loop.component.preemption import PreemptionWatch
from d9d.loop.component.profiler import JobProfiler
from d9d.loop.component.sleeper import TrainSleeper
from d9d.loop.component.task_operator import TrainTaskOperator
from d9d.loop.component.timeouts import TimeoutManager
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.component.tracker_writer import TrackerWriter

__all__ = [
    "DataParallelMicrobatchPackStream",
    "DevicePackStream",
    "DirectDevicePackStream",
    "GradientClipper",
    "GradientManager",
    "InferenceTaskOperator",
    "JobLogger",
    "JobProfiler",
    "JobSchedule",
    "LossSpikeDetector",
    "ManualGarbageCollector",
    "ModelStageExporter",
    "ModelStageFactory",
    "OptimizerFactory",
    "PipelineStateHandler",
    "PreemptionWatch",
    "PrefetchingDevicePackStream",
    "StateCheckpointer",
    "TimeoutManager",
    "TrackedModules",
    "TrackerWriter",
    "TrainSleeper",
    "TrainTaskOperator",
    "UpdateGuard",
    "build_device_pack_stream",
]
