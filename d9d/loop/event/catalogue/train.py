"""The events of a training job, in the order in which they come."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from d9d.loop.event.catalogue.common import (
    EventConfigurationStartedContext,
    EventDataStreamReadyContext,
    EventFinishedContext,
    EventModelStagesReadyContext,
    EventStepContext,
)
from d9d.loop.event.core import Event

if TYPE_CHECKING:
    from d9d.core.offload import SleepTag
    from d9d.core.protocol import LRSchedulerProtocol, OptimizerProtocol
    from d9d.internals.nonfinite import NonfiniteStep
    from d9d.loop.component.job_schedule import JobSchedule
    from d9d.loop.component.tracker_writer import TrackerWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptimizerReadyContext:
    """Given when the optimizer is built, before its state is loaded."""

    optimizer: "OptimizerProtocol"
    """Optimizer over all stages of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLRSchedulerReadyContext:
    """Given when the learning rate schedule is built, before its state is loaded."""

    lr_scheduler: "LRSchedulerProtocol"
    """Schedule over all stages of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTrainReadyContext:
    """Given when the checkpoint to resume from, if any, is loaded and the first step is next."""

    writer: "TrackerWriter"
    """Logs values to the run of this job. May be kept and used until the job has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNonfiniteContext:
    """Given when the loss or the gradient norm of a step is not finite, on all ranks."""

    schedule: "JobSchedule"
    """Position in the job: ``current_step`` is the step that runs, from 0."""
    found: "NonfiniteStep"
    """What is not finite, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLossSpikeContext:
    """Given when the loss of a step stands out, two steps later and on all ranks."""

    schedule: "JobSchedule"
    """Position in the job: ``current_step`` is the step that runs, from 0."""
    step: int
    """The step of the loss, from 1."""
    loss: float
    """Its loss."""
    median: float
    """Median of the losses before; NaN while they are too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPreemptedContext:
    """Given when a signal has stopped the job between two steps."""

    schedule: "JobSchedule"
    """Position in the job: ``current_step`` steps are done."""
    signal_name: str
    """Name of the signal, such as ``SIGTERM``, that some rank has got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSleepContext:
    """Given around falling asleep and waking up."""

    tags: "frozenset[SleepTag]"
    """What is given up or taken back."""


EVENT_TRAIN_CONFIG_STARTED = Event[EventConfigurationStartedContext]("train.configuration.start")
"""The ranks are known; the stream, the stages and the optimizer are still to be built."""

EVENT_TRAIN_DATA_STREAM_READY = Event[EventDataStreamReadyContext]("train.configuration.data_stream")
"""The data can be read."""

EVENT_TRAIN_MODEL_STAGES_READY = Event[EventModelStagesReadyContext]("train.configuration.model_stages")
"""The stages of this rank are built and hold their weights."""

EVENT_TRAIN_OPTIMIZER_READY = Event[EventOptimizerReadyContext]("train.configuration.optimizer")
"""The optimizer is built."""

EVENT_TRAIN_LR_SCHEDULER_READY = Event[EventLRSchedulerReadyContext]("train.configuration.lr_scheduler")
"""The learning rate schedule is built."""

EVENT_TRAIN_RESUMED = Event[EventStepContext]("train.resumed")
"""Only where a checkpoint was loaded, before `EVENT_TRAIN_READY`: ``current_step`` steps are done, and what an earlier start has done
after them is done again. The place to change what has led there, after a spike of the loss. (A learning rate that is put into the
groups of an optimizer lasts until the next step of its schedule, which computes it from ``base_lrs``.)"""

EVENT_TRAIN_READY = Event[EventTrainReadyContext]("train.ready")
"""Everything is built and resumed; the first step is next."""

EVENT_TRAIN_STEP_PRE = Event[EventStepContext]("train.step.pre")
"""A step starts; its data is not read yet."""

EVENT_TRAIN_FORWARD_BACKWARD_PRE = Event[EventStepContext]("train.forward_backward.pre")
"""The data of the step is there; the pipeline is about to run."""

EVENT_TRAIN_FORWARD_BACKWARD_POST = Event[EventStepContext]("train.forward_backward.post")
"""All microbatches have gone forward and backward; gradients are neither reduced nor clipped for certain."""

EVENT_TRAIN_OPTIMIZER_STEP_PRE = Event[EventStepContext]("train.optimizer_step.pre")
"""Gradients are reduced, weighted and clipped; parameters are as the step found them."""

EVENT_TRAIN_OPTIMIZER_STEP_POST = Event[EventStepContext]("train.optimizer_step.post")
"""Parameters are updated; gradients are still there."""

EVENT_TRAIN_NONFINITE = Event[EventNonfiniteContext]("train.nonfinite")
"""Between the two events of the optimizer step: it is about to be left out, or to end the job, by
``gradient_manager.on_nonfinite``. With "ignore" nobody looks, and the event does not come."""

EVENT_TRAIN_LOSS_SPIKE = Event[EventLossSpikeContext]("train.loss_spike")
"""A loss stands out by ``loss_spike``, two steps after it was computed. A handler that raises, on all ranks, ends the job, whose
next start goes back to the newest checkpoint."""

EVENT_TRAIN_STEP_POST = Event[EventStepContext]("train.step.post")
"""The step is logged and its gradients are gone; ``current_step`` is still its number."""

EVENT_TRAIN_FINISHED = Event[EventFinishedContext]("train.finished")
"""All steps are done and the task is finalized."""

EVENT_TRAIN_PREEMPTED = Event[EventPreemptedContext]("train.preempted")
"""A signal ends the job before its last step, on all ranks after the same step; a checkpoint is written next."""

EVENT_TRAIN_SLEEP_PRE = Event[EventSleepContext]("train.sleep.pre")
"""The job is about to give up device memory or communicators."""

EVENT_TRAIN_SLEEP_POST = Event[EventSleepContext]("train.sleep.post")
"""The job has given them up."""

EVENT_TRAIN_WAKE_PRE = Event[EventSleepContext]("train.wake.pre")
"""The job is about to take them back."""

EVENT_TRAIN_WAKE_POST = Event[EventSleepContext]("train.wake.post")
"""The job has them back."""
