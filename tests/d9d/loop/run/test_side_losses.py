"""Losses that layers add, in the native loop: the same weights as with these terms in the loss of one process."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.side_loss import attach_side_loss
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
    InitializeModelStageContext,
)
from d9d.pipelining.failure import PipelineActionError, PipelinePeerError
from tests.d9d.loop.run.pipelined_job import PipelinedProvider, build_whole_model
from tests.d9d.loop.run.regression_job import GLOBAL_BATCH_SIZE, Batch, Data, Task, build_job
from tests.d9d.loop.run.test_pipelined_training import SCHEDULES
from tests.harness.parity import FP64_EXACT, named_full_parameters

NUM_STEPS = 4
COEFFICIENT = 0.3


def weight_of(index: torch.Tensor) -> torch.Tensor:
    """Weights 0 to 3 by microbatch of two samples."""
    return (index[0] // 2 % 4).double()


class WeighingTask(Task):
    """Knows the weight of a microbatch ahead of its forward pass."""

    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[Batch]
    ) -> BuildForwardInputsResult[torch.Tensor, None, Batch]:
        return dataclasses.replace(super().build_forward_inputs(ctx), loss_weight=weight_of(ctx.batch.index))

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        return dataclasses.replace(super().compute_loss(ctx), loss_weight=None)


class TwiceWeighingTask(WeighingTask):
    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        return Task.compute_loss(self, ctx)


class Provider(PipelinedProvider):
    def initialize_model_stage(self, context: InitializeModelStageContext) -> Any:
        result = super().initialize_model_stage(context)
        for block in result.model.layers.values():
            block.register_forward_hook(
                lambda module, args, output: attach_side_loss(output, COEFFICIENT * output.square().mean())
            )
        return result


def train_plainly() -> nn.Module:
    model, data = build_whole_model(torch.float64), Data(GLOBAL_BATCH_SIZE * 30, torch.float64)
    terms: list[torch.Tensor] = []
    for block in model.layers.values():
        block.register_forward_hook(lambda module, args, output: terms.append(output.square().mean()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.9 * step / NUM_STEPS)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        microbatches = torch.arange(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE).view(-1, 2)
        total = sum(weight_of(index) for index in microbatches)
        for index in microbatches:
            terms.clear()
            loss = (model(data.x[index], None) - data.y[index]).square().mean() + COEFFICIENT * sum(terms)
            (loss * weight_of(index) / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return model


def build(tmp_path, mesh: DeviceMeshParameters, schedule: str, task: type[Task], **options: bool):
    return build_job(
        mesh,
        tmp_path,
        total_steps=NUM_STEPS,
        weight=weight_of,
        task_class=task,
        model_provider=Provider(torch.float64, **options),
        overrides={"pipelining": {"schedule": SCHEDULES[schedule]}},
    )


def check(
    tmp_path, mesh: DeviceMeshParameters, schedule: str, task: type[Task] = WeighingTask, **options: bool
) -> None:
    job = build(tmp_path, mesh, schedule, task, **options)
    job.trainer.train()
    expected = train_plainly()
    for stage in job.trainer._state.tracked_modules.modules:
        for name, value in named_full_parameters(stage).items():
            torch.testing.assert_close(value, expected.get_parameter(name).detach(), rtol=0, atol=FP64_EXACT)


@pytest.mark.parametrize("task", [Task, WeighingTask])
def test_one_process(tmp_path, task: type[Task]):
    check(tmp_path, DeviceMeshParameters(), "gpipe", task)


@pytest.mark.world_size(2)
def test_data_parallelism(tmp_path):
    check(tmp_path, DeviceMeshParameters(data_parallel_shard=2), "gpipe", Task)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v", "dual_pipe_v"])
def test_pipelines(tmp_path, schedule: str):
    """Stages without the loss have its weight from the inputs."""
    check(tmp_path, DeviceMeshParameters(pipeline_parallel=2), schedule)


@pytest.mark.world_size(2)
def test_checkpointed_blocks_in_a_pipeline(tmp_path):
    check(tmp_path, DeviceMeshParameters(pipeline_parallel=2), "zb1p", checkpoints=True)


@pytest.mark.world_size(2)
def test_a_pipeline_that_does_not_know_the_weight_is_refused(tmp_path):
    job = build(tmp_path, DeviceMeshParameters(pipeline_parallel=2), "1f1b", Task)
    with pytest.raises((PipelineActionError, PipelinePeerError)) as caught:
        job.trainer.train()
    if isinstance(caught.value, PipelineActionError):
        assert "return loss_weight from build_forward_inputs" in str(caught.value.__cause__)


def test_two_weights_are_refused(tmp_path):
    job = build(tmp_path, DeviceMeshParameters(), "gpipe", TwiceWeighingTask)
    with pytest.raises(ValueError, match="both build_forward_inputs"):
        job.trainer.train()
