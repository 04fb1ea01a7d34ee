"""What a pipelined model, its schedule and the loop agree on."""

import abc
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch

from d9d.core.types import PyTree, TensorSpec
from d9d.pipelining.actions import ActionBase

__all__ = [
    "ActionTiming",
    "BackwardObserver",
    "DeclaresTiedParameters",
    "ModuleSupportsPipelining",
    "PipelineLossFn",
    "PipelineResultFn",
    "PipelineSchedule",
    "PipelineStageInfo",
    "StageBoundary",
    "TPipelineInput",
    "TPipelineOutput",
    "TSharedInput",
    "TStageTransfer",
    "TensorSpec",
    "distribute_layers_for_pipeline_stage",
]

TPipelineInput = TypeVar("TPipelineInput")
TPipelineOutput = TypeVar("TPipelineOutput")
TSharedInput = TypeVar("TSharedInput")
TStageTransfer = TypeVar("TStageTransfer")

# A protocol needs the variance of its parameters spelled out; the public names above stay invariant for everyone else.
_InputContra = TypeVar("_InputContra", contravariant=True)
_SharedContra = TypeVar("_SharedContra", contravariant=True)
_OutputCo = TypeVar("_OutputCo", covariant=True)


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStageInfo:
    """Locates one stage in the pipeline.

    Attributes:
        current_stage: Zero-based index of the stage, counted over the whole pipeline and not per rank.
        num_stages: Number of stages of the whole pipeline.
    """

    current_stage: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise ValueError(f"num_stages ({self.num_stages}) must be at least 1.")
        if not 0 <= self.current_stage < self.num_stages:
            raise ValueError(
                f"current_stage ({self.current_stage}) is outside the pipeline: valid stages are "
                f"0 to {self.num_stages - 1}."
            )

    @property
    def is_current_stage_first(self) -> bool:
        """Tell whether the stage takes the pipeline input."""
        return self.current_stage == 0

    @property
    def is_current_stage_last(self) -> bool:
        """Tell whether the stage returns the pipeline output."""
        return self.current_stage == self.num_stages - 1


def distribute_layers_for_pipeline_stage(
    num_layers: int, num_virtual_layers_pre: int, num_virtual_layers_post: int, stage: PipelineStageInfo
) -> tuple[int, int]:
    """Choose the layers that a stage builds, so that all stages do about the same work.

    Virtual layers stand for work outside the layers: `num_virtual_layers_pre` on the first stage (such as an embedding),
    `num_virtual_layers_post` on the last one (such as a language modelling head). Real and virtual layers together are
    split evenly, and the earlier stages take one more each when that leaves a rest.

    Returns:
        `(start, end)`, the half-open range of layer indices of the stage. It can be empty on a first or last stage that
        is filled by its virtual layers.

    Raises:
        ValueError: A count is negative, or some stage would have less than its virtual layers or nothing to do.
    """
    counts = {
        "num_layers": num_layers,
        "num_virtual_layers_pre": num_virtual_layers_pre,
        "num_virtual_layers_post": num_virtual_layers_post,
    }
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} ({count}) must not be negative.")

    shares = _layers_per_stage(num_layers, num_virtual_layers_pre, num_virtual_layers_post, stage.num_stages)
    start = sum(shares[: stage.current_stage])
    return start, start + shares[stage.current_stage]


def _layers_per_stage(num_layers: int, num_pre: int, num_post: int, num_stages: int) -> list[int]:
    base, num_larger = divmod(num_layers + num_pre + num_post, num_stages)
    if base == 0:
        raise ValueError(
            f"{num_layers} layers with {num_pre} + {num_post} virtual layers cannot fill {num_stages} stages: "
            f"use at most {num_layers + num_pre + num_post} stages (pipeline_parallel x stages per rank of the schedule)."
        )
    shares = [base + 1 if index < num_larger else base for index in range(num_stages)]
    shares[0] -= num_pre
    shares[-1] -= num_post
    if min(shares) < 0:
        raise ValueError(
            f"a stage holds {base} of the {num_layers + num_pre + num_post} real and virtual layers, fewer than the "
            f"virtual layers of the first ({num_pre}) or last ({num_post}) stage: lower num_virtual_layers_pre, "
            f"num_virtual_layers_post or the number of stages ({num_stages})."
        )
    return shares


class StageBoundary(enum.Enum):
    """Names the side of a stage that a transfer crosses.

    `incoming` is what the stage receives from the stage before it, `outgoing` what it sends to the stage after it.
    """

    incoming = "incoming"
    outgoing = "outgoing"


class ModuleSupportsPipelining(Protocol[_InputContra, TStageTransfer, _SharedContra, _OutputCo]):
    """Describes a module that can be one stage of several."""

    def forward(self, inputs: _InputContra | TStageTransfer, shared: _SharedContra) -> TStageTransfer | _OutputCo:
        """Run one microbatch through the stage.

        Args:
            inputs: The pipeline input on the first stage, what the stage before sent on the others.
            shared: What every stage gets for the microbatch.

        Returns:
            The pipeline output on the last stage, what the next stage receives on the others.
        """
        ...

    def stage_transfer_spec(self, pipeline_input: _InputContra, boundary: StageBoundary) -> PyTree[TensorSpec]:
        """Describe the tensors that cross a boundary of the stage, without running it.

        Args:
            pipeline_input: Input of one microbatch, for the shapes that follow from it.
            boundary: The side of the stage that is asked about.
        """
        ...


@runtime_checkable
class DeclaresTiedParameters(Protocol):
    """Describes a stage that has copies of weights which other stages have too, such as an embedding and a head."""

    def tied_parameters(self) -> Mapping[str, str]:
        """Name the copies of this stage.

        Copies of one weight are kept equal: their values by those of the lowest stage, their gradients by a sum. They
        must have the same shape, dtype, placements and `requires_grad`, and need the same treatment by the optimizer.

        Returns:
            Key of the weight by name of the parameter, as of ``named_parameters()``. All stages use one key for a weight,
            and each has a parameter of its own. A stage that has a weight twice uses one parameter under two names.
        """
        ...


PipelineLossFn: TypeAlias = Callable[[TPipelineOutput, int], torch.Tensor]
"""Turns the output of a microbatch and its index in the pack into the scalar that its backward pass starts from."""

PipelineResultFn: TypeAlias = Callable[[TPipelineOutput, int], None]
"""Takes the output of a microbatch and its index in the pack, when there is no backward pass."""


class BackwardObserver(Protocol):
    """Hears about the backward passes of a pack that produce gradients of weights.

    Per stage there is one such pass for each microbatch: the full backward pass, or the second half of a split one.
    """

    def before_microbatch(self, microbatch: int) -> None:
        """Take note of the microbatch whose backward pass, or half of one, is about to run; ahead of what follows here."""
        ...

    def before_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        """Prepare for a pass just before it runs.

        Args:
            stage: Position of the stage among those of this rank.
            is_last: Whether no further pass of the pack produces gradients in this stage. Here is the place to switch
                gradient communication on. The last passes of a rank's stages come in descending order of the stages.
            is_split: Whether the schedule splits backward passes, of which this may be the second half. Autograd may run
                no module then. The same for all passes of a job, whatever the size of the pack.
        """
        ...

    def before_split_backward(self, stage: int) -> None:
        """Prepare for the first half of a split pass, which produces gradients of activations, just before it runs."""
        ...

    def after_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        """Take note that a pass has run; takes what `before_backward` has got."""
        ...


ActionTiming: TypeAlias = tuple[ActionBase, float, float]
"""An action with its start and end, in seconds since the start of the step."""


class PipelineSchedule(abc.ABC, Generic[TPipelineInput, TSharedInput, TPipelineOutput]):
    """Runs all microbatches of a pack through the stages of this rank."""

    @abc.abstractmethod
    def step(
        self,
        inputs_microbatches: tuple[TPipelineInput, ...],
        shared_microbatches: tuple[TSharedInput, ...],
        callback: PipelineLossFn[TPipelineOutput] | PipelineResultFn[TPipelineOutput],
    ) -> None:
        """Run one pack. Every rank of the job must call it, with packs of the same number of microbatches.

        Args:
            inputs_microbatches: Pipeline input of each microbatch.
            shared_microbatches: Shared data of each microbatch, in the same order.
            callback: Called once per microbatch on the ranks that host the last stage. A schedule that trains runs the
                backward pass from the tensor that it returns.
        """

    @abc.abstractmethod
    def set_backward_observer(self, observer: BackwardObserver | None) -> None:
        """Tell one object about each backward pass from the next step on. `None` tells nobody."""

    @abc.abstractmethod
    def record_next_step(self) -> None:
        """Measure each action of the next step. On an accelerator the host waits for each of them then."""

    @abc.abstractmethod
    def take_timings(self) -> list[ActionTiming]:
        """Return what the recorded step has taken, and record no more. Empty if no step has been recorded."""


# Stage modules are of any type here: what a job puts into `inputs`, `shared` and the output is its own choice.
AnyPipelineSchedule: TypeAlias = PipelineSchedule[Any, Any, Any]
"""A schedule of a job whose input types are not known statically."""
