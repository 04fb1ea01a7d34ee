"""What handlers are given at the points that training and inference share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from d9d.core.dist_context import DistributedContext
    from d9d.core.protocol import MicrobatchPackStream
    from d9d.loop.component.job_schedule import JobSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStepContext:
    """Given at points within a step."""

    schedule: "JobSchedule"
    """Position in the job: ``current_step`` is the step that runs, from 0; it moves on after ``step.post``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventConfigurationStartedContext:
    """Given when the ranks are known and nothing else is built."""

    dist_context: "DistributedContext"
    """The ranks of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDataStreamReadyContext:
    """Given when the data can be read, before any of it was."""

    stream: "MicrobatchPackStream"
    """Packs of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventModelStagesReadyContext:
    """Given when the pipeline stages of this rank are built, parallelized and hold their weights."""

    modules: "list[nn.Module]"
    """Stages of this rank, in ascending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFinishedContext:
    """Given when the job has done its last step."""
