"""The native training loop: the same numbers on every mesh, and exact resumption."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MeanSquaredError

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.control import CreateMetricsResult
from d9d.loop.event.catalogue.train import EVENT_TRAIN_OPTIMIZER_STEP_PRE, EVENT_TRAIN_STEP_POST
from d9d.metric.impl.torchmetrics import TorchMetricsMetric
from tests.d9d.loop.run.regression_job import (
    GLOBAL_BATCH_SIZE,
    Data,
    Task,
    build_job,
    build_model,
    collate,
    plain_losses,
)
from tests.harness.parity import FP32_CLOSE, FP64_EXACT, named_full_parameters

MESHES = {
    1: [DeviceMeshParameters()],
    2: [DeviceMeshParameters(data_parallel_replicate=2), DeviceMeshParameters(data_parallel_shard=2)],
    4: [
        DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2),
        DeviceMeshParameters(data_parallel_shard=4),
        DeviceMeshParameters(data_parallel_replicate=4),
    ],
}


def check_parity(folder: Path, dtype: torch.dtype, tolerance: float, weight=lambda index: None) -> None:
    losses, model = plain_losses(20, dtype, weight)
    for number, mesh in enumerate(MESHES[dist.get_world_size()]):
        job = build_job(mesh, folder / str(number), dtype=dtype, weight=weight)
        job.trainer.train()
        for name, value in named_full_parameters(job.model).items():
            torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=0, atol=tolerance)
        if dist.get_rank() == 0:
            assert list(job.losses()) == list(range(1, 21))
            torch.testing.assert_close(list(job.losses().values()), losses, rtol=0, atol=tolerance)
            assert set(job.logged("samples").values()) == {float(GLOBAL_BATCH_SIZE)}
        dist.barrier()


@pytest.mark.world_size(1)
def test_one_process_equals_plain_pytorch(tmp_path):
    check_parity(tmp_path, torch.float64, FP64_EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64_EXACT), (torch.float32, FP32_CLOSE)])
def test_two_ranks_equal_plain_pytorch(tmp_path, dtype, tolerance):
    check_parity(tmp_path, dtype, tolerance)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64_EXACT), (torch.float32, FP32_CLOSE)])
def test_four_ranks_equal_plain_pytorch(tmp_path, dtype, tolerance):
    check_parity(tmp_path, dtype, tolerance)


class StepCutShortError(Exception):
    """Ends a job in the middle of a step."""


def uneven_weight(index: torch.Tensor) -> torch.Tensor:
    """Weights 0 to 3 by microbatch; the loss of a microbatch of weight 0 is 0 / 0."""
    return (index[0] // 2 % 4).double()


@pytest.mark.world_size(4)
def test_weighted_loss_equals_plain_pytorch(tmp_path):
    check_parity(tmp_path, torch.float64, FP64_EXACT, uneven_weight)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
def test_a_step_without_weight_changes_nothing(tmp_path, mesh):
    def weight(index: torch.Tensor) -> torch.Tensor:
        return torch.tensor(0.0 if index[0] // GLOBAL_BATCH_SIZE == 1 else 1.0)

    job = build_job(mesh, tmp_path, total_steps=3, weight=weight)
    before: list[dict[str, torch.Tensor]] = []
    state = job.trainer._state

    def remember(context: object) -> None:
        before.append({name: value.clone() for name, value in named_full_parameters(job.model).items()})

    state.event_bus.subscribe(EVENT_TRAIN_STEP_POST, remember)
    job.trainer.train()
    for name, value in before[0].items():
        assert torch.equal(value, before[1][name]), name
        assert not torch.equal(value, before[2][name]), name
        assert torch.isfinite(before[2][name]).all()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
def test_resume_continues_bit_for_bit(tmp_path, mesh):
    options = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 4}}
    straight = build_job(mesh, tmp_path / "straight", total_steps=12, dropout=0.5)
    straight.trainer.train()
    # The learning rate schedule ends with the job, so the first leg runs a job of the same length and is cut short.
    first = build_job(mesh, tmp_path / "resumed", total_steps=12, dropout=0.5, overrides=options)

    def cut(context) -> None:
        if context.schedule.current_step == 9:
            raise StepCutShortError

    first.trainer._state.event_bus.subscribe(EVENT_TRAIN_OPTIMIZER_STEP_PRE, cut)
    with pytest.raises(StepCutShortError):
        first.trainer.train()
    second = build_job(mesh, tmp_path / "resumed", total_steps=12, dropout=0.5, overrides=options)
    second.trainer.train()
    assert second.task.read == straight.task.read[-len(second.task.read) :]
    expected = named_full_parameters(straight.model)
    for name, value in named_full_parameters(second.model).items():
        assert torch.equal(value, expected[name]), name
    if dist.get_rank() == 0:
        for step in range(9, 13):
            assert second.losses()[step] == straight.losses()[step], step


@pytest.mark.world_size(4)
def test_resume_on_another_mesh(tmp_path):
    options = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 5}}
    shard = DeviceMeshParameters(data_parallel_shard=4)
    hybrid = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2)
    build_job(shard, tmp_path / "a", total_steps=5, overrides=options).trainer.train()
    resumed = build_job(hybrid, tmp_path / "b", total_steps=10, overrides=options)
    resumed.trainer.train()
    unmoved = {"checkpointing": {"save_dir": str(tmp_path / "unmoved"), "period_steps": 5}}
    build_job(shard, tmp_path / "c", total_steps=5, overrides=unmoved).trainer.train()
    same_mesh = build_job(shard, tmp_path / "d", total_steps=10, overrides=unmoved)
    same_mesh.trainer.train()
    expected = named_full_parameters(same_mesh.model)
    for name, value in named_full_parameters(resumed.model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=FP64_EXACT)


def test_a_complete_job_returns_at_once(tmp_path):
    options = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": "last_step"}}
    build_job(DeviceMeshParameters(), tmp_path, total_steps=3, overrides=options).trainer.train()
    again = build_job(DeviceMeshParameters(), tmp_path, total_steps=3, overrides=options)
    again.trainer.train()
    assert again.task.read == []


@pytest.mark.world_size(2)
def test_metrics_of_a_period_that_is_half_over_go_on(tmp_path):
    """Logged every 4 steps, saved after 2 of them: what the first start has counted is in the first value."""
    mesh = DeviceMeshParameters(data_parallel_replicate=2)
    options = {
        "checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2},
        "logging": {"period_steps": 4, "tracker": {"provider": "jsonl", "path": str(tmp_path / "log.jsonl")}},
    }
    first = build_job(mesh, tmp_path, total_steps=8, overrides=options, task_class=FailsAt)
    first.task.step = 3
    with pytest.raises(FailsAtError):
        first.trainer.train()
    job = build_job(mesh, tmp_path, total_steps=8, overrides=options)
    job.trainer.train()
    if dist.get_rank() == 0:
        assert job.logged("samples") == {4: 4.0 * GLOBAL_BATCH_SIZE, 8: 4.0 * GLOBAL_BATCH_SIZE}


class FailsAtError(Exception):
    pass


class FailsAt(Task):
    """Fails in a step, when no checkpoint is newer than the one that the job has resumed from."""

    step = 0

    def compute_loss(self, ctx):
        if ctx.schedule.step_in_progress == self.step:
            raise FailsAtError
        return super().compute_loss(ctx)


def test_a_job_that_is_through_is_not_counted_again(tmp_path, monkeypatch):
    """A script trains twice. Restarts begin with the first job, which has nothing left to do, while the second one gets further."""

    def restart(attempt: int, fails_at: int) -> None:
        for name, value in (("RUN_ID", "job"), ("RESTART_COUNT", str(attempt)), ("MAX_RESTARTS", "9")):
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        saving = {"period_steps": 2, "max_restarts_without_progress": 0}
        first = {"checkpointing": saving | {"save_dir": str(tmp_path / "first")}}
        build_job(DeviceMeshParameters(), tmp_path / "first", total_steps=2, overrides=first).trainer.train()
        second = {"checkpointing": saving | {"save_dir": str(tmp_path / "second")}}
        job = build_job(DeviceMeshParameters(), tmp_path / "second", overrides=second, task_class=FailsAt)
        job.task.step = fails_at
        with pytest.raises(FailsAtError):
            job.trainer.train()

    for attempt in range(3):
        restart(attempt, fails_at=3 + 2 * attempt)
    restart(3, fails_at=7)  # the first one that resumes from step 6
    with pytest.raises(RuntimeError, match=r"restarted 1 times in a row .* of step 6"):
        restart(4, fails_at=7)


def test_more_steps_than_the_data_has_are_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"total_steps \(31\) is more than the data has \(30\)"):
        build_job(DeviceMeshParameters(), tmp_path, total_steps=31)


def test_data_that_ends_early_is_named(tmp_path):
    job = build_job(DeviceMeshParameters(), tmp_path, total_steps=31, data_provider=lambda context: ShortStream())
    with pytest.raises(RuntimeError, match=r"ended after step 2 of 31"):
        job.trainer.train()


def test_the_same_batch_in_other_microbatches_gives_the_same_numbers(tmp_path):
    losses, _ = plain_losses(5, torch.float64)
    for size in (1, 4, 16):
        job = build_job(DeviceMeshParameters(), tmp_path / str(size), total_steps=5, microbatch_size=size)
        job.trainer.train()
        torch.testing.assert_close(list(job.losses().values()), losses, rtol=0, atol=FP64_EXACT)


class UnevenStream:
    """Packs of 1 microbatch on rank 0 and of 4 on rank 1: the steps of ten samples each."""

    total_steps = 3

    def __iter__(self):
        data = Data(30, torch.float64)
        for step in range(self.total_steps):
            starts = [0] if dist.get_rank() == 0 else [2, 4, 6, 8]
            yield tuple(collate([data[10 * step + start + offset] for offset in range(2)]) for start in starts)

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class ShortStream(UnevenStream):
    """Ends after two steps, and does not know it."""

    total_steps = None

    def __iter__(self):
        data = Data(4, torch.float64)
        return iter([(collate([data[0], data[1]]),), (collate([data[2], data[3]]),)])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
def test_ranks_may_have_different_numbers_of_microbatches(tmp_path, mesh):
    job = build_job(mesh, tmp_path, total_steps=3, data_provider=lambda context: UnevenStream())
    job.trainer.train()
    model = build_model(torch.float64)
    data = Data(30, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.05 * (1.0 - 0.9 * step / 3)
        optimizer.zero_grad()
        # Five microbatches of two samples weigh the same: the mean over all ten.
        (model(data.x[10 * step :][:10], None) - data.y[10 * step :][:10]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for name, value in named_full_parameters(job.model).items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=0, atol=FP64_EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
def test_a_penalty_over_parameters_is_refused(tmp_path, mesh):
    # One microbatch per rank: FSDP has freed the inner unit when the loss is computed.
    job = build_job(mesh, tmp_path, total_steps=3, microbatch_size=8)
    compute_loss = job.task.compute_loss

    def with_penalty(ctx):
        result = compute_loss(ctx)
        penalty = sum(parameter.to_local().square().sum() for parameter in job.model.up.parameters())
        return dataclasses.replace(result, loss=result.loss + penalty)

    job.task.compute_loss = with_penalty
    with pytest.raises(RuntimeError, match=r"reached a distributed parameter of shape .* directly"):
        job.trainer.train()


class MeasuringTask(Task):
    """Measures, by a metric of torchmetrics, what it also optimises."""

    def create_metrics(self, ctx):
        return CreateMetricsResult(metrics={"mse": TorchMetricsMetric(MeanSquaredError())})

    def compute_loss(self, ctx):
        ctx.state.output = ctx.pipeline_results
        return super().compute_loss(ctx)

    def update_metrics(self, ctx):
        ctx.metrics["mse"].update(ctx.state.output, ctx.state.y)


@pytest.mark.world_size(2)
def test_a_metric_of_the_outputs_equals_the_loss(tmp_path):
    job = build_job(MESHES[2][0], tmp_path, total_steps=4, task_class=MeasuringTask, dtype=torch.float32)
    job.trainer.train()
    if dist.get_rank() == 0:
        assert job.logged("mse") == pytest.approx(job.losses(), rel=1e-6)


@pytest.mark.world_size(2)
def test_uneven_packs_are_refused_where_every_microbatch_is_a_collective(tmp_path):
    overrides = {"gradient_manager": {"fsdp_keep_sharded": True}}
    job = build_job(
        MESHES[2][1], tmp_path, total_steps=3, data_provider=lambda context: UnevenStream(), overrides=overrides
    )
    with pytest.raises(ValueError, match=r"ranks have 1 to 4 microbatches"):
        job.trainer.train()


class TakesLongToFinish(Task):
    """Needs longer for its end than a step may take."""

    is_finished = False

    def finalize(self, context):
        time.sleep(5.5)
        self.is_finished = True


@pytest.mark.exhaustive
@pytest.mark.world_size(2)
def test_the_end_of_a_job_may_take_longer_than_a_step(tmp_path):
    mesh = DeviceMeshParameters(data_parallel_replicate=2)
    overrides = {"timeout": {"init_timeout": 60, "step_timeout": 3}}
    job = build_job(mesh, tmp_path, total_steps=2, overrides=overrides, task_class=TakesLongToFinish)
    job.trainer.train()
    assert job.task.is_finished
