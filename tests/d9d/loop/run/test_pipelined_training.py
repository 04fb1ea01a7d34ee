"""The native loop over pipelines: the same numbers as one process, with data parallelism beside, and what ranks agree on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.materialize import materialize_module
from d9d.loop.component import GradientManager, TrackedModules
from d9d.loop.component.tracked_modules import everything
from d9d.loop.config import GradientManagerConfig
from d9d.loop.event.catalogue.train import EVENT_TRAIN_OPTIMIZER_STEP_PRE
from d9d.pipelining.api import PipelineStageInfo
from d9d.pipelining.factory import AnyPipelineScheduleConfig, build_schedule
from d9d.pipelining.failure import PipelineActionError, PipelinePeerError
from d9d.pipelining.visualize import read_measured_timeline
from tests.d9d.loop.run.pipelined_job import (
    NUM_LAYERS,
    PipelinedModel,
    PipelinedProvider,
    build_whole_model,
    parallelize_data,
)
from tests.d9d.loop.run.regression_job import (
    BASE_SEED,
    GLOBAL_BATCH_SIZE,
    Job,
    Task,
    build_job,
    plain_losses,
)
from tests.harness.parity import FP64_EXACT, named_full_gradients, named_full_parameters

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "looped_bfs": {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    "1f1b": {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": False},
    "interleaved": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": False},
    "zb1p": {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": True},
    "interleaved_zb1p": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    "zero_bubble_v": {"schedule": "zero_bubble_v"},
    "dual_pipe_v": {"schedule": "dual_pipe_v"},
}
NUM_STEPS = 5


def build_pipelined_job(
    mesh: DeviceMeshParameters,
    folder: Path,
    schedule: str,
    *,
    provider: PipelinedProvider | None = None,
    overrides: dict[str, Any] | None = None,
    **options: Any,
) -> Job:
    pipelining = {"schedule": SCHEDULES[schedule], **(overrides or {}).get("pipelining", {})}
    return build_job(
        mesh,
        folder,
        model_provider=provider or PipelinedProvider(torch.float64),
        overrides={**(overrides or {}), "pipelining": pipelining},
        **{"total_steps": NUM_STEPS, **options},
    )


def check_against(job: Job, losses: list[float], model: nn.Module) -> None:
    for stage in job.trainer._state.tracked_modules.modules:
        for name, value in named_full_parameters(stage).items():
            torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=0, atol=FP64_EXACT)
    if dist.get_rank() == 0:
        torch.testing.assert_close(list(job.losses().values()), losses, rtol=0, atol=FP64_EXACT)
        assert set(job.logged("samples").values()) == {float(GLOBAL_BATCH_SIZE)}


def check_parity(mesh: DeviceMeshParameters, folder: Path, names: list[str], **options: Any) -> None:
    losses, model = plain_losses(NUM_STEPS, torch.float64, model=build_whole_model(torch.float64))
    for name in names:
        job = build_pipelined_job(mesh, folder / name, name, **options)
        job.trainer.train()
        check_against(job, losses, model)
        dist.barrier()


@pytest.mark.world_size(2)
def test_two_stages_on_two_ranks_equal_plain_pytorch(tmp_path):
    # 8 microbatches of 2 samples.
    check_parity(DeviceMeshParameters(pipeline_parallel=2), tmp_path, list(SCHEDULES))


@pytest.mark.world_size(4)
def test_four_pipeline_ranks_equal_plain_pytorch(tmp_path):
    check_parity(DeviceMeshParameters(pipeline_parallel=4), tmp_path, list(SCHEDULES))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["replicate", "shard"])
def test_pipelines_beside_data_parallelism_equal_plain_pytorch(tmp_path, name):
    mesh = DeviceMeshParameters.model_validate({"pipeline_parallel": 2, f"data_parallel_{name}": 2})
    # 4 microbatches of 2 samples on each replica, then a single one of 8.
    check_parity(mesh, tmp_path / "four", list(SCHEDULES))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["replicate", "shard"])
def test_one_microbatch_beside_data_parallelism_equals_plain_pytorch(tmp_path, name):
    mesh = DeviceMeshParameters.model_validate({"pipeline_parallel": 2, f"data_parallel_{name}": 2})
    check_parity(mesh, tmp_path, list(SCHEDULES), microbatch_size=8)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("options", [{"checkpoints": True}, {"compiles": True}], ids=["checkpointed", "compiled"])
def test_blocks_inside_a_stage_are_checkpointed_or_compiled(tmp_path, options):
    provider = PipelinedProvider(torch.float64, **options)
    names = ["1f1b", "zb1p", "zero_bubble_v"]
    check_parity(DeviceMeshParameters(pipeline_parallel=2), tmp_path, names, provider=provider)


def uneven_weight(index: torch.Tensor) -> torch.Tensor:
    """Weights 0 to 3 by microbatch; the loss of a microbatch of weight 0 is 0 / 0."""
    return (index[0] // 2 % 4).double()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v"])
def test_loss_weights_count_as_on_one_process(tmp_path, name):
    losses, model = plain_losses(NUM_STEPS, torch.float64, uneven_weight, model=build_whole_model(torch.float64))
    job = build_pipelined_job(DeviceMeshParameters(pipeline_parallel=2), tmp_path, name, weight=uneven_weight)
    job.trainer.train()
    check_against(job, losses, model)


@pytest.mark.world_size(2)
def test_a_step_without_weight_changes_no_stage(tmp_path):
    def weight(index: torch.Tensor) -> torch.Tensor:
        return torch.tensor(0.0)

    job = build_pipelined_job(DeviceMeshParameters(pipeline_parallel=2), tmp_path, "1f1b", weight=weight)
    before = named_full_parameters(job.model)
    job.trainer.train()
    for name, value in named_full_parameters(job.model).items():
        assert torch.equal(value, before[name]), name


UNEQUAL_PACKS = [(3, 4), (1, 6), (5, 2)]
"""Microbatches of two replicas. In some, dual_pipe_v ends a stage with a whole pass on one and with a half on the other."""


@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", ["interleaved", "zb1p", "zero_bubble_v", "dual_pipe_v"])
def test_sharded_replicas_may_have_different_numbers_of_microbatches(schedule):
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build()
    samples = torch.randn(2, 6, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    modules: list[PipelinedModel] = []

    def build(stage: PipelineStageInfo) -> nn.Module:
        with torch.device("meta"):
            modules.append(PipelinedModel(torch.float64, stage))
        parallelize_data(context, modules[-1])
        return modules[-1]

    config = TypeAdapter(AnyPipelineScheduleConfig).validate_python(SCHEDULES[schedule])
    info, _ = build_schedule(context, config, build)
    for module in modules:
        materialize_module(module, torch.device("cpu"), BASE_SEED)
    manager = GradientManager(context, TrackedModules(context, list(modules), everything), GradientManagerConfig())
    info.schedule.set_backward_observer(manager)
    with manager.install():
        for counts in UNEQUAL_PACKS:
            own = samples[context.dp_rank, : counts[context.dp_rank]]
            manager.set_required_accumulations(len(own))
            info.schedule.step(
                tuple(own), (None,) * len(own), lambda output, _: manager.add_loss_with_weight(output.sum(), None)
            )
            manager.sync_and_scale()
            whole = build_whole_model(torch.float64)
            pack = torch.cat([samples[replica, :count].flatten(0, 1) for replica, count in enumerate(counts)])
            (whole(pack, None).sum() / sum(counts)).backward()
            for module in modules:
                for name, gradient in named_full_gradients(module).items():
                    expected = whole.get_parameter(name).grad
                    assert expected is not None
                    torch.testing.assert_close(gradient, expected, rtol=0, atol=FP64_EXACT)
            manager.zero_grad()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v"])
def test_a_frozen_stage_is_no_obstacle(tmp_path, name):
    class FirstHalfFrozen(PipelinedProvider):
        def initialize_model_stage(self, context):
            result = super().initialize_model_stage(context)
            freeze_first_half(result.model)
            return result

    model = build_whole_model(torch.float64)
    freeze_first_half(model)
    losses, model = plain_losses(NUM_STEPS, torch.float64, model=model)
    mesh = DeviceMeshParameters(pipeline_parallel=2)
    job = build_pipelined_job(mesh, tmp_path, name, provider=FirstHalfFrozen(torch.float64))
    job.trainer.train()
    check_against(job, losses, model)


def freeze_first_half(model: PipelinedModel) -> None:
    for name, block in model.layers.items():
        block.requires_grad_(int(name) >= NUM_LAYERS // 2)
    if model.up is not None:
        model.up.requires_grad_(False)


@pytest.mark.world_size(2)
def test_a_job_without_anything_to_train_is_refused_by_all(tmp_path):
    class Frozen(PipelinedProvider):
        def initialize_model_stage(self, context):
            result = super().initialize_model_stage(context)
            result.model.requires_grad_(False)
            return result

    with pytest.raises(ValueError, match="no stage of the pipeline has a parameter that requires a gradient"):
        build_pipelined_job(DeviceMeshParameters(pipeline_parallel=2), tmp_path, "1f1b", provider=Frozen(torch.float64))


class StepCutShortError(Exception):
    """Ends a job in the middle of a step."""


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v"])
def test_resume_continues_bit_for_bit(tmp_path, name):
    mesh = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2)
    saving = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2}}
    straight = build_pipelined_job(mesh, tmp_path / "straight", name)
    straight.trainer.train()
    first = build_pipelined_job(mesh, tmp_path / "resumed", name, overrides=saving)

    def cut(context) -> None:
        if context.schedule.current_step == 3:
            raise StepCutShortError

    first.trainer._state.event_bus.subscribe(EVENT_TRAIN_OPTIMIZER_STEP_PRE, cut)
    with pytest.raises(StepCutShortError):
        first.trainer.train()
    second = build_pipelined_job(mesh, tmp_path / "resumed", name, overrides=saving)
    second.trainer.train()
    pairs = zip(
        straight.trainer._state.tracked_modules.modules, second.trainer._state.tracked_modules.modules, strict=True
    )
    for ours, theirs in pairs:
        expected = named_full_parameters(ours)
        for key, value in named_full_parameters(theirs).items():
            assert torch.equal(value, expected[key]), key


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["1f1b", "dual_pipe_v"])
def test_a_step_is_measured_and_drawn(tmp_path, name):
    picture = tmp_path / "shared" / "step.svg"
    overrides = {"pipelining": {"schedule": SCHEDULES[name], "timeline": {"path": str(picture), "step": 2}}}
    job = build_pipelined_job(DeviceMeshParameters(pipeline_parallel=2), tmp_path, name, overrides=overrides)
    job.trainer.train()
    dist.barrier()
    if dist.get_rank() == 0:
        assert picture.read_text().startswith("<svg")
        assert len(json.loads(picture.with_suffix(".json").read_text())["ranks"]) == 2
        timeline = read_measured_timeline(picture.with_suffix(".json"))
        assert sorted(timeline.events) == [0, 1]
        assert timeline.makespan > 0


@pytest.mark.world_size(1)
def test_a_step_of_one_process_is_measured_too(tmp_path):
    overrides = {"pipelining": {"timeline": {"path": str(tmp_path / "step.html"), "step": 2}}}
    build_pipelined_job(DeviceMeshParameters(), tmp_path, "gpipe", overrides=overrides).trainer.train()
    (events,) = read_measured_timeline(tmp_path / "step.json").events.values()
    # 8 microbatches.
    assert [str(event.action) for event in events] == [f"0{kind}{index}" for index in range(8) for kind in "FB"]


class CountingTask(Task):
    """Keeps a number that only the rank of the last stage can know."""

    num_losses = 0

    def compute_loss(self, ctx):
        self.num_losses += 1
        return super().compute_loss(ctx)

    def state_dict(self):
        return {"num_losses": self.num_losses}

    def load_state_dict(self, state_dict):
        self.num_losses = state_dict["num_losses"]


@pytest.mark.world_size(2)
def test_a_resumed_task_knows_what_it_has_counted_on_the_last_stage(tmp_path):
    mesh = DeviceMeshParameters(pipeline_parallel=2)
    saving = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": NUM_STEPS}}
    build_pipelined_job(mesh, tmp_path, "1f1b", overrides=saving, task_class=CountingTask).trainer.train()
    resumed = build_pipelined_job(mesh, tmp_path, "1f1b", overrides=saving, task_class=CountingTask)
    resumed.trainer.train()
    assert isinstance(resumed.task, CountingTask)
    assert resumed.task.num_losses == 8 * NUM_STEPS


@pytest.mark.world_size(2)
@pytest.mark.parametrize("other", ["zero_bubble_v", "gpipe"])
def test_another_cut_goes_on(tmp_path, other):
    """Two stages on each rank, then the same ones elsewhere, or half as many."""
    mesh = DeviceMeshParameters(pipeline_parallel=2)
    losses, model = plain_losses(NUM_STEPS, torch.float64, model=build_whole_model(torch.float64))
    saving = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2}}
    first = build_pipelined_job(mesh, tmp_path / "first", "interleaved", overrides=saving)

    def cut(context) -> None:
        if context.schedule.current_step == 3:
            raise StepCutShortError

    first.trainer._state.event_bus.subscribe(EVENT_TRAIN_OPTIMIZER_STEP_PRE, cut)
    with pytest.raises(StepCutShortError):
        first.trainer.train()
    second = build_pipelined_job(mesh, tmp_path / "second", other, overrides=saving)
    second.trainer.train()
    check_against(second, losses[2:], model)


class LongerProvider(PipelinedProvider):
    """Has a parameter more in the last stage."""

    def initialize_model_stage(self, context):
        result = super().initialize_model_stage(context)
        if result.model.down is not None:
            result.model.down.register_parameter("gain", nn.Parameter(torch.zeros((), dtype=torch.float64)))
            reset = result.model.down.reset_parameters

            def reset_with_gain() -> None:
                reset()
                nn.init.zeros_(result.model.down.gain)

            result.model.down.reset_parameters = reset_with_gain
        return result


@pytest.mark.world_size(2)
def test_a_parameter_that_one_stage_has_got_is_refused_on_all_ranks(tmp_path):
    mesh = DeviceMeshParameters(pipeline_parallel=2)
    saving = {"save_dir": str(tmp_path / "saved"), "period_steps": NUM_STEPS}
    build_pipelined_job(mesh, tmp_path, "1f1b", overrides={"checkpointing": saving}).trainer.train()
    longer = LongerProvider(torch.float64)
    job = build_pipelined_job(mesh, tmp_path, "1f1b", provider=longer, overrides={"checkpointing": saving})
    with pytest.raises(ValueError, match=r"on rank 1 of 2: cannot resume .*\n- state\.model\.down\.gain is not in it"):
        job.trainer.train()
    saving["on_changed_parameters"] = "allow"
    job = build_pipelined_job(mesh, tmp_path, "1f1b", provider=longer, overrides={"checkpointing": saving})
    job.trainer.train()


class FailingTask(Task):
    """Has a loss that fails, on the rank that computes it."""

    def compute_loss(self, ctx):
        if ctx.schedule.current_step == 1:
            raise ArithmeticError("no such label")
        return super().compute_loss(ctx)


@pytest.mark.world_size(2, timeout_s=60)
def test_a_failing_loss_ends_the_job_on_all_ranks(tmp_path):
    mesh = DeviceMeshParameters(pipeline_parallel=2)
    job = build_pipelined_job(mesh, tmp_path, "1f1b", task_class=FailingTask)
    expected = PipelineActionError if dist.get_rank() == 1 else PipelinePeerError
    with pytest.raises(
        expected,
        match=r"1F0 failed on pipeline rank 1 \(rank 1 of the job\) \(stage 1, microbatch 0\): ArithmeticError: no such",
    ):
        job.trainer.train()
