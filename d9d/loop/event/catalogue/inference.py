"""The events of an inference job, in the order in which they come."""

from dataclasses import dataclass

from d9d.loop.event.catalogue.common import (
    EventConfigurationStartedContext,
    EventDataStreamReadyContext,
    EventFinishedContext,
    EventModelStagesReadyContext,
    EventStepContext,
)
from d9d.loop.event.core import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EventInferenceReadyContext:
    """Given when everything is built and resumed."""


EVENT_INFERENCE_CONFIG_STARTED = Event[EventConfigurationStartedContext]("inference.configuration.start")
"""The ranks are known; the stream and the stages are still to be built."""

EVENT_INFERENCE_DATA_STREAM_READY = Event[EventDataStreamReadyContext]("inference.configuration.data_stream")
"""The data can be read."""

EVENT_INFERENCE_MODEL_STAGES_READY = Event[EventModelStagesReadyContext]("inference.configuration.model_stages")
"""The stages of this rank are built and hold their weights."""

EVENT_INFERENCE_READY = Event[EventInferenceReadyContext]("inference.ready")
"""Everything is built and resumed; the first step is next."""

EVENT_INFERENCE_STEP_PRE = Event[EventStepContext]("inference.step.pre")
"""A step starts; its data is not read yet."""

EVENT_INFERENCE_FORWARD_PRE = Event[EventStepContext]("inference.forward.pre")
"""The data of the step is there; the pipeline is about to run."""

EVENT_INFERENCE_FORWARD_POST = Event[EventStepContext]("inference.forward.post")
"""All microbatches have gone forward and their outputs were processed."""

EVENT_INFERENCE_STEP_POST = Event[EventStepContext]("inference.step.post")
"""The step is done; ``current_step`` is still its number."""

EVENT_INFERENCE_FINISHED = Event[EventFinishedContext]("inference.finished")
"""All steps are done and the task is finalized."""
