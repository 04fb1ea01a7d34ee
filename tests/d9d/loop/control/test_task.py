"""What a task may leave out, and contexts that are built with type parameters."""

from typing import Any

import pytest
import torch
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
    CreateMetricsContext,
    FinalizeContext,
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    PrepareExportModelStageContext,
    TrainTask,
)


class SmallestTask(TrainTask[float, float, None, float, None]):
    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[float]
    ) -> BuildForwardInputsResult[float, None, None]:
        return BuildForwardInputsResult[float, None, None](input=ctx.batch, shared=None, state=None)

    def compute_loss(self, ctx: ComputeLossContext[float, None]) -> ComputeLossResult:
        return ComputeLossResult(loss=torch.tensor(ctx.pipeline_results))


class SmallestProvider(ModelProvider[nn.Linear]):
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[nn.Linear]:
        raise NotImplementedError

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[nn.Linear]) -> None:
        raise NotImplementedError


def test_a_task_needs_inputs_and_a_loss_only():
    task = SmallestTask()
    built = task.build_forward_inputs(BuildForwardInputsContext[float](batch=2.0))
    assert (built.input, built.shared, built.state) == (2.0, None, None)
    assert task.create_metrics(CreateMetricsContext()).metrics == {}
    assert task.dump_hparams() == {}
    assert task.state_dict() == {}
    task.load_state_dict({})
    task.finalize(FinalizeContext())


def test_a_task_without_a_loss_cannot_be_made():
    class Incomplete(TrainTask[Any, Any, Any, Any, Any]):
        def build_forward_inputs(self, ctx):
            raise NotImplementedError

    with pytest.raises(TypeError, match="compute_loss"):
        Incomplete()


def test_a_missing_weight_means_none():
    assert ComputeLossResult(loss=torch.tensor(1.0)).loss_weight is None


def test_an_export_that_is_not_written_names_the_provider():
    context = PrepareExportModelStageContext(dist_context=DeviceMeshParameters().build(), model=nn.Linear(1, 1))
    with pytest.raises(NotImplementedError, match="SmallestProvider cannot export"):
        SmallestProvider().prepare_export_model_stage(context)
