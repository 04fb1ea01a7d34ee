"""Callables that build the parts of a job once its topology is known."""

import abc
import dataclasses
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from d9d.core.dist_context import DistributedContext
from d9d.core.protocol import LRSchedulerProtocol, MicrobatchPackStream
from d9d.loop.control.task import InferenceTask, TrainTask

__all__ = [
    "DataProvider",
    "InferenceTaskProvider",
    "InferenceTaskProviderContext",
    "InitializeDataProviderContext",
    "InitializeLRSchedulerContext",
    "InitializeOptimizerStageContext",
    "LRSchedulerProvider",
    "OptimizerProvider",
    "TrainTaskProvider",
    "TrainTaskProviderContext",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainTaskProviderContext:
    """Carries what building a training task needs.

    Attributes:
        dist_context: Topology of the job.
    """

    dist_context: DistributedContext


# `Any` below: the loop passes what a task's types hold from the data to the model and back, and looks at none of it.
class TrainTaskProvider(Protocol):
    """Builds the task of a training job."""

    def __call__(self, ctx: TrainTaskProviderContext) -> TrainTask[Any, Any, Any, Any, Any]:
        """Build the task. Called once on every rank."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InferenceTaskProviderContext:
    """Carries what building an inference task needs.

    Attributes:
        dist_context: Topology of the job.
    """

    dist_context: DistributedContext


class InferenceTaskProvider(Protocol):
    """Builds the task of an inference job."""

    def __call__(self, ctx: InferenceTaskProviderContext) -> InferenceTask[Any, Any, Any, Any, Any]:
        """Build the task. Called once on every rank."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitializeDataProviderContext:
    """Carries what building a data stream needs.

    Attributes:
        dist_context: Topology of the job. Ranks with the same `dp` coordinate of the batch domain must get the same data.
    """

    dist_context: DistributedContext


class DataProvider(Protocol):
    """Builds the data stream of a job."""

    def __call__(self, context: InitializeDataProviderContext) -> MicrobatchPackStream:
        """Build the stream of packs of this rank. Called once on every rank.

        In a given step, all ranks must get packs of the same number of microbatches.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitializeOptimizerStageContext:
    """Carries what building the optimizer of a stage needs.

    Attributes:
        dist_context: Topology of the job.
        model: The stage, distributed and initialized.
    """

    dist_context: DistributedContext
    model: nn.Module


class OptimizerProvider(Protocol):
    """Builds the optimizer of a stage."""

    @abc.abstractmethod
    def __call__(self, context: InitializeOptimizerStageContext) -> Optimizer:
        """Build the optimizer. Called on each rank for every stage that it hosts."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitializeLRSchedulerContext:
    """Carries what building the learning rate scheduler of a stage needs.

    Attributes:
        dist_context: Topology of the job.
        total_steps: Number of steps of the job.
        optimizer: Optimizer whose learning rate the scheduler sets.
    """

    dist_context: DistributedContext
    total_steps: int
    optimizer: Optimizer


class LRSchedulerProvider(Protocol):
    """Builds the learning rate scheduler of a stage."""

    @abc.abstractmethod
    def __call__(self, context: InitializeLRSchedulerContext) -> LRSchedulerProtocol:
        """Build the scheduler. Called on each rank for every stage that it hosts."""
        ...
