"""What a job computes: the interface between a task and the loop.

[Note: generic contexts are not frozen]
A slotted, frozen, generic dataclass fails when it is built as `Context[X](...)`: typing sets an attribute on the new
object, and the generated `__setattr__` raises a TypeError that typing does not expect (Python 3.11 to 3.14).
"""

import abc
import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import DistributedContext
from d9d.core.types import ScalarTree
from d9d.loop.event import EventBus
from d9d.pipelining.api import TPipelineInput, TPipelineOutput, TSharedInput

if TYPE_CHECKING:
    from d9d.loop.component.job_schedule import JobSchedule
    from d9d.metric import Metric

__all__ = [
    "BaseTask",
    "BuildForwardInputsContext",
    "BuildForwardInputsResult",
    "ComputeLossContext",
    "ComputeLossResult",
    "CreateMetricsContext",
    "CreateMetricsResult",
    "FinalizeContext",
    "InferenceTask",
    "ProcessOutputsContext",
    "RegisterTaskEventsContext",
    "TBatch",
    "TState",
    "TrainTask",
    "UpdateMetricsContext",
]

TBatch = TypeVar("TBatch")
TState = TypeVar("TState")


@dataclasses.dataclass(kw_only=True, slots=True)
class BuildForwardInputsContext(typing.Generic[TBatch]):
    """Carries one microbatch to the task.

    Attributes:
        batch: What the collate function returned, with its tensors on the device of this rank.
        is_idle: Whether the microbatch is only run because other ranks have one more, with no weight. Its tokens are no load of
            experts: a task of such a model masks them (`SequenceShared.token_mask`).
    """

    batch: TBatch
    is_idle: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class BuildForwardInputsResult(typing.Generic[TPipelineInput, TSharedInput, TState]):
    """Splits one microbatch into what the model sees and what the task keeps.

    Attributes:
        input: Input of the first stage.
        shared: Data that every stage gets.
        state: What the loss or the metrics need besides the model output; kept on this rank until the step is done.
        loss_weight: Weight of the microbatch, if it is known here already; then `ComputeLossResult` has none. Stages whose
            layers add losses of their own need it, as they never see what `compute_loss` returns.
    """

    input: TPipelineInput
    shared: TSharedInput
    state: TState
    loss_weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegisterTaskEventsContext:
    """Carries what a task needs to subscribe to events.

    Attributes:
        dist_context: Topology of the job.
        event_bus: Bus that the loop triggers its events on.
    """

    dist_context: DistributedContext
    event_bus: EventBus


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinalizeContext:
    """Marks the end of a job. It has no fields yet."""


class BaseTask(abc.ABC, Stateful, typing.Generic[TBatch, TPipelineInput, TSharedInput, TState]):
    """Turns microbatches into model inputs. Common to training and inference."""

    @abc.abstractmethod
    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[TBatch]
    ) -> BuildForwardInputsResult[TPipelineInput, TSharedInput, TState]:
        """Split a microbatch into model input, shared data and state.

        Called on every rank for each microbatch of a pack, before the first forward pass of the step.
        """

    # `Any`: a checkpoint takes whatever PyTorch's distributed checkpoint can store.
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should keep of the task. Default: nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned. Default: there is nothing to take."""

    # The hooks below are empty on purpose, and not abstract: a task overrides those it needs.
    def register_events(self, context: RegisterTaskEventsContext) -> None:
        """Subscribe to events of the loop. Called once, before anything else is built. Default: none."""

    def finalize(self, ctx: FinalizeContext) -> None:
        """Finish the work of the task. Called on every rank after the last step. Default: nothing."""


@dataclasses.dataclass(kw_only=True, slots=True)
class ComputeLossContext(typing.Generic[TPipelineOutput, TState]):
    """Carries the output of one microbatch to the loss.

    Attributes:
        pipeline_results: Output of the last stage, with its graph.
        state: State that `build_forward_inputs` returned for the same microbatch.
        schedule: Position of the job, for losses that change over its course.
    """

    pipeline_results: TPipelineOutput
    state: TState
    schedule: "JobSchedule"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComputeLossResult:
    """Holds the loss of one microbatch and how much it counts.

    Attributes:
        loss: Loss of the microbatch, one value.
        loss_weight: Weight of the microbatch in the mean over the step, one value >= 0, such as its number of tokens when
            `loss` is a mean over tokens. None means 1.
    """

    loss: torch.Tensor
    loss_weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CreateMetricsContext:
    """Asks for the metrics of a job. It has no fields yet."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CreateMetricsResult:
    """Holds the metrics of a job.

    Attributes:
        metrics: Metrics by the name that they are logged under.
    """

    metrics: "dict[str, Metric[Any]]"


@dataclasses.dataclass(kw_only=True, slots=True)
class UpdateMetricsContext(typing.Generic[TState]):
    """Carries one microbatch to the metrics.

    Attributes:
        state: State that `build_forward_inputs` returned for the microbatch. What the loss left in it is there too.
        metrics: Metrics of the job by name.
    """

    state: TState
    metrics: "Mapping[str, Metric[Any]]"


class TrainTask(
    BaseTask[TBatch, TPipelineInput, TSharedInput, TState],
    abc.ABC,
    typing.Generic[TBatch, TPipelineInput, TSharedInput, TPipelineOutput, TState],
):
    """Defines what a training job minimizes and measures."""

    @abc.abstractmethod
    def compute_loss(self, ctx: ComputeLossContext[TPipelineOutput, TState]) -> ComputeLossResult:
        """Compute the loss of one microbatch. Called on the ranks that host the last stage."""

    def create_metrics(self, ctx: CreateMetricsContext) -> CreateMetricsResult:
        """Create the metrics of the job, the same on every rank. Called once. Default: none."""
        return CreateMetricsResult(metrics={})

    def update_metrics(self, ctx: UpdateMetricsContext[TState]) -> None:
        """Add one microbatch to the metrics. Must not wait for the device. Default: nothing."""

    def dump_hparams(self) -> ScalarTree:
        """Return hyperparameters of the task for the experiment tracker. Default: none."""
        return {}


@dataclasses.dataclass(kw_only=True, slots=True)
class ProcessOutputsContext(typing.Generic[TPipelineOutput, TState]):
    """Carries the output of one microbatch of an inference job.

    Attributes:
        pipeline_results: Output of the last stage.
        state: State that `build_forward_inputs` returned for the same microbatch.
    """

    pipeline_results: TPipelineOutput
    state: TState


class InferenceTask(
    BaseTask[TBatch, TPipelineInput, TSharedInput, TState],
    abc.ABC,
    typing.Generic[TBatch, TPipelineInput, TSharedInput, TPipelineOutput, TState],
):
    """Defines what an inference job does with the outputs of the model."""

    @abc.abstractmethod
    def process_outputs(self, ctx: ProcessOutputsContext[TPipelineOutput, TState]) -> None:
        """Use the output of one microbatch. Called on the ranks that host the last stage."""
