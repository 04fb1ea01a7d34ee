"""How a job builds, distributes, loads and exports its model."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import nn

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.types import ScalarTree
from d9d.loop.event import EventBus
from d9d.model_state.mapper import ModelStateMapper
from d9d.pipelining.api import PipelineStageInfo

__all__ = [
    "InitializeModelStageContext",
    "InitializeModelStageResult",
    "ModelProvider",
    "ParallelizeModelStageContext",
    "PrepareExportModelStageContext",
    "PrepareExportModelStageResult",
    "RegisterModelEventsContext",
    "TModel",
]

TModel = TypeVar("TModel", bound=nn.Module)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitializeModelStageContext:
    """Carries what building a stage needs.

    Attributes:
        dist_context: Topology of the job.
        stage: The stage to build, out of all stages of the pipeline.
    """

    dist_context: DistributedContext
    stage: PipelineStageInfo


# Generic contexts are not frozen: see [Note: generic contexts are not frozen] in `d9d.loop.control.task`.
@dataclasses.dataclass(kw_only=True, slots=True)
class InitializeModelStageResult(Generic[TModel]):
    """Holds a stage that has no memory yet.

    Attributes:
        model: The stage, on the meta device.
        state_mapper: Turns the tensors of a model state into those of the stage, when the job loads one.
        keep: Patterns, as of `fnmatch`, of parameters and buffers that keep their initial values then, such as adapters
            and new heads. All others must come from the mapper.
    """

    model: TModel
    state_mapper: ModelStateMapper
    keep: Sequence[str] = ()


@dataclasses.dataclass(kw_only=True, slots=True)
class ParallelizeModelStageContext(Generic[TModel]):
    """Carries a stage to be distributed.

    Attributes:
        dist_context: Topology of the job.
        stage: Place of the stage in the pipeline.
        model: The stage, on the meta device, to be changed in place.
    """

    dist_context: DistributedContext
    stage: PipelineStageInfo
    model: TModel


@dataclasses.dataclass(kw_only=True, slots=True)
class PrepareExportModelStageContext(Generic[TModel]):
    """Carries a trained stage to be exported.

    Attributes:
        dist_context: Topology of the job.
        model: The stage, distributed as in training.
    """

    dist_context: DistributedContext
    model: TModel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrepareExportModelStageResult:
    """Holds what an export needs.

    Attributes:
        state_mapper: Turns the tensors of the stage into those of the exported model state.
    """

    state_mapper: ModelStateMapper


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegisterModelEventsContext:
    """Carries what a model provider needs to subscribe to events.

    Attributes:
        dist_context: Topology of the job.
        event_bus: Bus that the loop triggers its events on.
    """

    dist_context: DistributedContext
    event_bus: EventBus


class ModelProvider(abc.ABC, Generic[TModel]):
    """Builds the stages of a model and chooses the parallelism of each of their submodules."""

    @abc.abstractmethod
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[TModel]:
        """Build one stage. Called under `torch.device("meta")`, on each rank for the stages that it hosts.

        It may not communicate. What it raises on some ranks of a pipeline is raised on all.

        The model must have a method `reset_parameters()` that initializes every parameter and buffer: the loop calls it
        after memory is allocated.
        """

    @abc.abstractmethod
    def parallelize_model_stage(self, context: ParallelizeModelStageContext[TModel]) -> None:
        """Turn the parameters of a stage into distributed ones, in place.

        Called on every rank, before memory is allocated. Not called when all parallelism degrees are 1. What it raises on
        some ranks of a pipeline is raised on all; ranks that communicate in it must fail together by themselves.
        """

    def prepare_export_model_stage(
        self, context: PrepareExportModelStageContext[TModel]
    ) -> PrepareExportModelStageResult:
        """Prepare the export of one stage to a model state.

        Raises:
            NotImplementedError: The provider has no export. This is the default.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot export its model: implement prepare_export_model_stage()."
        )

    def mesh_problems(self, mesh: DeviceMeshParameters, num_stages: int) -> list[str]:
        """Return why the model does not fit a mesh, each with its numbers and a way to mend it. Default: nothing is checked.

        Called before any process group exists. For models of the catalogue, `decoder_mesh_problems` knows it.

        Args:
            mesh: Parallelism degrees.
            num_stages: Number of stages that the pipeline has; 1 without one.
        """
        return []

    # Empty on purpose, and not abstract: a provider overrides it when it needs it.
    def register_events(self, context: RegisterModelEventsContext) -> None:
        """Subscribe to events of the loop. Called once, before anything else is built. Default: none."""

    def dump_hparams(self) -> ScalarTree:
        """Return hyperparameters of the model for the experiment tracker. Default: none."""
        return {}
