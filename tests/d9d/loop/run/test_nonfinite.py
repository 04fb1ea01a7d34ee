"""Steps that are not finite: all ranks decide alike, and a step that is left out leaves nothing behind."""

import functools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.nonfinite import NonfiniteStepError
from d9d.loop.control import ComputeLossContext, ComputeLossResult
from d9d.loop.event.catalogue import train as events
from d9d.pipelining.factory import PipelineSchedule1F1BConfig
from tests.d9d.loop.run.pipelined_job import PipelinedProvider
from tests.d9d.loop.run.regression_job import GLOBAL_BATCH_SIZE, Batch, Job, Task, build_job, plain_losses
from tests.harness.parity import FP64_EXACT, named_full_parameters

BAD_STEP = 3
TOTAL_STEPS = 5
MESHES = [DeviceMeshParameters(data_parallel_replicate=2), DeviceMeshParameters(data_parallel_shard=2)]
IDS = ["replicate", "shard"]


class BadLoss(Task):
    """The loss of one microbatch in the job, which one rank reads, is `value`; or the gradients alone are bad."""

    value = math.nan
    has_bad_gradients = False

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        result = super().compute_loss(ctx)
        if ctx.state.index[0] != (BAD_STEP - 1) * GLOBAL_BATCH_SIZE:
            return result
        # The square root has an infinite slope at 0.
        bad = (result.loss * 0.0).sqrt() if self.has_bad_gradients else result.loss * self.value
        return ComputeLossResult(loss=bad, loss_weight=result.loss_weight)


class InfiniteLoss(BadLoss):
    value = math.inf


class BadGradients(BadLoss):
    has_bad_gradients = True


class InfiniteConstant(BadLoss):
    """A loss that is infinite, with gradients that are not."""

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        result = Task.compute_loss(self, ctx)
        is_bad = ctx.state.index[0] == (BAD_STEP - 1) * GLOBAL_BATCH_SIZE
        return ComputeLossResult(loss=result.loss + math.inf if is_bad else result.loss, loss_weight=result.loss_weight)


def build(folder: Path, mesh: DeviceMeshParameters, task: type[Task], policy: str, **options) -> Job:
    overrides = {
        "gradient_manager": {"on_nonfinite": policy},
        "checkpointing": {"save_dir": str(folder / "saved"), "period_steps": "disable"},
        **options.pop("overrides", {}),
    }
    return build_job(mesh, folder, total_steps=TOTAL_STEPS, task_class=task, overrides=overrides, **options)


class StateAround:
    """Keeps weights and optimizer state around the bad step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.before: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}
        bus = job.trainer._state.event_bus
        for event, into in (
            (events.EVENT_TRAIN_OPTIMIZER_STEP_PRE, self.before),
            (events.EVENT_TRAIN_OPTIMIZER_STEP_POST, self.after),
        ):
            bus.subscribe(event, functools.partial(self._take_at_bad_step, into))

    def _take_at_bad_step(self, into: dict[str, torch.Tensor], context) -> None:
        if context.schedule.current_step + 1 == BAD_STEP:
            self.take(into)

    def take(self, into: dict[str, torch.Tensor]) -> None:
        state = self._job.trainer._state
        for index, optimizer in enumerate(state.optimizer.by_stage.values()):
            for number, group in enumerate(optimizer.state_dict()["state"].values()):
                for name, value in group.items():
                    local = value.to_local() if hasattr(value, "to_local") else value
                    into[f"{index}.{number}.{name}"] = local.clone()
        for index, module in enumerate(state.tracked_modules.modules):
            into |= {f"{index}.{name}": value.clone() for name, value in named_full_parameters(module).items()}

    def assert_unchanged(self) -> None:
        assert len(self.before) > 4
        assert self.before.keys() == self.after.keys()
        for name, value in self.before.items():
            assert torch.equal(value, self.after[name]), name


def skipped_reference() -> torch.nn.Module:
    """Train in plain PyTorch, without the bad step; the learning rate goes on with the steps."""
    _, model = plain_losses(TOTAL_STEPS, torch.float64, skips=(BAD_STEP,))
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
@pytest.mark.parametrize("task", [BadLoss, InfiniteLoss, BadGradients, InfiniteConstant])
@pytest.mark.parametrize("max_norm", [0.5, None], ids=["clipped", "unclipped"])
def test_a_bad_step_is_left_out_by_all_ranks(tmp_path, mesh, task, max_norm):
    job = build(tmp_path, mesh, task, "skip", overrides={"gradient_clipping": {"max_norm": max_norm}})
    around = StateAround(job)
    found = []
    job.trainer._state.event_bus.subscribe(events.EVENT_TRAIN_NONFINITE, lambda context: found.append(context.found))
    job.trainer.train()
    around.assert_unchanged()
    assert job.trainer._state.update_guard.num_skipped == len(found) == 1
    # Global batches are dealt out in halves, so that rank 0 reads the first sample.
    assert found[0].loss_ranks == (() if task is BadGradients else (0,))
    assert math.isfinite(found[0].grad_norm) == (task is InfiniteConstant)
    if dist.get_rank() == 0:
        assert job.logged("nonfinite_steps") == {BAD_STEP: 1.0}
        assert list(job.losses()) == list(range(1, TOTAL_STEPS + 1))
    if max_norm is not None:
        expected = skipped_reference()
        for name, value in named_full_parameters(job.model).items():
            torch.testing.assert_close(value, expected.get_parameter(name).detach(), rtol=0, atol=FP64_EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
def test_a_bad_step_ends_the_job_on_all_ranks(tmp_path, mesh):
    job = build(tmp_path, mesh, BadLoss, "raise")
    around = StateAround(job)
    with pytest.raises(
        NonfiniteStepError, match=r"step 3: the gradient norm is nan, the loss is not finite on rank 0\."
    ):
        job.trainer.train()
    around.take(around.after)
    around.assert_unchanged()


@pytest.mark.world_size(2)
def test_by_default_nobody_looks(tmp_path):
    job = build_job(MESHES[0], tmp_path, total_steps=TOTAL_STEPS, task_class=BadLoss)
    job.trainer.train()
    assert all(torch.isnan(value).any() for value in named_full_parameters(job.model).values())


@pytest.mark.world_size(2)
def test_a_pipeline_decides_alike(tmp_path):
    job = build(
        tmp_path,
        DeviceMeshParameters(pipeline_parallel=2),
        BadLoss,
        "skip",
        overrides={"pipelining": {"schedule": PipelineSchedule1F1BConfig()}},
        model_provider=PipelinedProvider(torch.float64),
    )
    around = StateAround(job)
    found = []
    job.trainer._state.event_bus.subscribe(events.EVENT_TRAIN_NONFINITE, lambda context: found.append(context.found))
    job.trainer.train()
    around.assert_unchanged()
    assert [each.loss_ranks for each in found] == [(1,)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_weights_of_zero_are_no_bad_step(tmp_path, policy):
    """One rank without weight counts for nothing, a step without any is left out; its losses are 0 / 0."""

    def weight(index: torch.Tensor) -> torch.Tensor:
        step, place = divmod(int(index[0]), GLOBAL_BATCH_SIZE)
        is_empty = step == 1 or (step == 2 and place < GLOBAL_BATCH_SIZE // 2)
        return torch.tensor(0.0 if is_empty else 1.0)

    job = build(tmp_path, MESHES[1], Task, policy, weight=weight)
    job.trainer.train()
    assert job.trainer._state.update_guard.num_skipped == 0
    for name, value in named_full_parameters(job.model).items():
        assert torch.isfinite(value).all(), name
