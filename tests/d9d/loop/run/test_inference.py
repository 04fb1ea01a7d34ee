"""The inference loop: the outputs of a plain forward pass on every mesh, each sample once, also after an interruption."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from d9d.checkpoint import CheckpointContents
from d9d.checkpoint.documents import expanded, filled
from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.config import InferenceConfig
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    DataProvider,
    FinalizeContext,
    InferenceTask,
    ModelProvider,
    ProcessOutputsContext,
    RegisterTaskEventsContext,
)
from d9d.loop.event import Event
from d9d.loop.event.catalogue import inference as catalogue
from d9d.loop.event.catalogue.common import EventModelStagesReadyContext, EventStepContext
from d9d.loop.run import Inference, InferenceConfigurator
from tests.d9d.loop.run.pipelined_job import PipelinedProvider, build_whole_model
from tests.d9d.loop.run.regression_job import (
    BASE_SEED,
    GLOBAL_BATCH_SIZE,
    Batch,
    Data,
    Provider,
    build_job,
    build_model,
    collate,
)
from tests.harness.parity import FP64_EXACT

NUM_STEPS = 5
NUM_SAMPLES = GLOBAL_BATCH_SIZE * NUM_STEPS
REPLICATE = DeviceMeshParameters(data_parallel_replicate=2)
SHARD = DeviceMeshParameters(data_parallel_shard=2)
MESHES = {
    1: [DeviceMeshParameters()],
    2: [REPLICATE, SHARD],
    4: [DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2)],
}
EVENTS: list[Event[Any]] = [event for name, event in vars(catalogue).items() if name.startswith("EVENT_")]


class Task(InferenceTask[Batch, torch.Tensor, None, torch.Tensor, torch.Tensor]):
    """Notes the output and a random number for each sample, and counts microbatches over interruptions."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.outputs: dict[int, float] = {}
        self.draws: dict[int, float] = {}
        self.num_microbatches = 0
        self.num_finalized = 0
        self.fails_at_step: int | None = None

    def register_events(self, context: RegisterTaskEventsContext) -> None:
        for event in EVENTS:
            context.event_bus.subscribe(event, lambda ctx, event=event: self.events.append(event.id))
        context.event_bus.subscribe(catalogue.EVENT_INFERENCE_MODEL_STAGES_READY, self._take_model)
        context.event_bus.subscribe(catalogue.EVENT_INFERENCE_FORWARD_POST, self._fail)

    def _take_model(self, context: EventModelStagesReadyContext) -> None:
        [self.model] = context.modules

    def _fail(self, context: EventStepContext) -> None:
        if context.schedule.step_in_progress == self.fails_at_step:
            raise CutShortError

    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[Batch]
    ) -> BuildForwardInputsResult[torch.Tensor, None, torch.Tensor]:
        return BuildForwardInputsResult(input=ctx.batch.x, shared=None, state=ctx.batch.index)

    def process_outputs(self, ctx: ProcessOutputsContext[torch.Tensor, torch.Tensor]) -> None:
        self.events.append("process_outputs")
        indices = ctx.state.tolist()
        assert not set(indices) & set(self.outputs)
        self.outputs.update(zip(indices, ctx.pipeline_results.squeeze(1).tolist(), strict=True))
        self.draws.update(zip(indices, torch.rand(len(indices)).tolist(), strict=True))
        self.num_microbatches += 1

    def finalize(self, ctx: FinalizeContext) -> None:
        self.events.append("finalize")
        self.num_finalized += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_microbatches": self.num_microbatches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_microbatches = state_dict["num_microbatches"]


class CutShortError(Exception):
    """Ends a job in the middle of a step."""


@dataclasses.dataclass
class Job:
    inference: Inference
    task: Task

    @property
    def model(self) -> torch.nn.Module:
        return self.task.model


def build(
    mesh: DeviceMeshParameters,
    folder: Path,
    *,
    overrides: dict[str, Any] | None = None,
    data_provider: DataProvider | None = None,
    microbatch_size: int = 2,
    model_provider: ModelProvider[Any] | None = None,
) -> Job:
    config = InferenceConfig.model_validate(
        {
            "determinism": {"base_seed": BASE_SEED},
            "gc": {"period_steps": 2},
            "checkpointing": {"save_dir": str(folder / "checkpoints"), "period_steps": "disable"},
            **(overrides or {}),
        }
    )
    data = AutoDataConfig(
        global_batch_size=GLOBAL_BATCH_SIZE, microbatch_size=microbatch_size, num_workers=0, pin_memory=False
    )
    task = Task()
    inference = InferenceConfigurator(
        mesh=mesh,
        parameters=config,
        task_provider=lambda context: task,
        # Dropout that stayed on would be seen in every output.
        model_provider=model_provider or Provider(torch.float64, dropout=0.5),
        data_provider=data_provider or AutoDataProvider(lambda context: samples(), collate, data),
    ).configure()
    return Job(inference, task)


def samples() -> Data:
    return Data(NUM_SAMPLES, torch.float64)


def of_all_ranks(values: dict[int, float]) -> dict[int, float]:
    if not dist.is_initialized():
        return values
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    merged = {index: value for part in gathered for index, value in part.items()}
    assert len(merged) == sum(map(len, gathered))
    return merged


def check_outputs(outputs: dict[int, float], num_samples: int = NUM_SAMPLES) -> None:
    """Compare with one forward pass over all samples by the same model, without dropout, in plain PyTorch."""
    expected = build_model(torch.float64)(samples().x, None).squeeze(1).tolist()
    assert sorted(outputs) == list(range(num_samples))
    found = [outputs[index] for index in range(num_samples)]
    torch.testing.assert_close(found, expected[:num_samples], rtol=0, atol=FP64_EXACT)


def check_parity(folder: Path) -> None:
    for number, mesh in enumerate(MESHES[dist.get_world_size()]):
        job = build(mesh, folder / str(number))
        job.inference.infer()
        check_outputs(of_all_ranks(job.task.outputs))
        assert job.task.num_finalized == 1
        assert not any(module.training for module in job.model.modules())
        assert all(parameter.grad is None for parameter in job.model.parameters())


@pytest.mark.world_size(1)
def test_one_process_equals_a_plain_forward_pass(tmp_path):
    check_parity(tmp_path)


@pytest.mark.world_size(2)
def test_two_ranks_equal_a_plain_forward_pass(tmp_path):
    check_parity(tmp_path)


@pytest.mark.world_size(4)
def test_four_ranks_equal_a_plain_forward_pass(tmp_path):
    check_parity(tmp_path)


def test_the_steps_of_the_config_go_before_the_length_of_the_data(tmp_path):
    job = build(DeviceMeshParameters(), tmp_path, overrides={"schedule": {"total_steps": 2}}, microbatch_size=16)
    job.inference.infer()
    check_outputs(job.task.outputs, 2 * GLOBAL_BATCH_SIZE)


def test_events_come_in_the_order_of_the_catalogue(tmp_path):
    job = build(DeviceMeshParameters(), tmp_path, overrides={"schedule": {"total_steps": 2}}, microbatch_size=8)
    configuration = ["configuration.start", "configuration.data_stream", "configuration.model_stages"]
    assert job.task.events == [f"inference.{name}" for name in configuration]
    job.task.events.clear()
    job.inference.infer()
    outputs = ["process_outputs"] * 2
    step = ["inference.step.pre", "inference.forward.pre", *outputs, "inference.forward.post", "inference.step.post"]
    assert job.task.events == ["inference.ready", *step, *step, "finalize", "inference.finished"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
@pytest.mark.parametrize("prefetch_factor", [0, 2])
def test_an_interrupted_job_goes_on_with_the_right_samples(tmp_path, mesh, prefetch_factor):
    overrides = {
        "checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2},
        "data_prefetch": {"prefetch_factor": prefetch_factor},
    }
    straight = build(mesh, tmp_path / "straight")
    straight.inference.infer()
    # Ranks draw different numbers for their samples.
    assert len(set(of_all_ranks(straight.task.draws).values())) == NUM_SAMPLES
    first = build(mesh, tmp_path, overrides=overrides)
    first.task.fails_at_step = 4
    with pytest.raises(CutShortError):
        first.inference.infer()
    second = build(mesh, tmp_path, overrides=overrides)
    second.inference.infer()
    # Steps 3 and 4 were done after the last checkpoint: 3 to 5 are done again.
    assert sorted(of_all_ranks(second.task.outputs)) == list(range(2 * GLOBAL_BATCH_SIZE, NUM_SAMPLES))
    check_outputs(of_all_ranks({**first.task.outputs, **second.task.outputs}))
    assert second.task.draws == {index: straight.task.draws[index] for index in second.task.outputs}
    assert second.task.num_microbatches == straight.task.num_microbatches == NUM_STEPS * GLOBAL_BATCH_SIZE // 2 // 2
    assert (first.task.num_finalized, second.task.num_finalized) == (0, 1)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["save-2", "save-4", "save-5"]


@pytest.mark.world_size(2)
def test_another_mesh_goes_on_with_the_same_samples(tmp_path):
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2}}
    first = build(REPLICATE, tmp_path, overrides={**overrides, "schedule": {"total_steps": 2}})
    first.inference.infer()
    second = build(SHARD, tmp_path, overrides=overrides, microbatch_size=8)
    second.inference.infer()
    assert not set(first.task.outputs) & set(second.task.outputs)
    check_outputs(of_all_ranks({**first.task.outputs, **second.task.outputs}))


def test_random_states_of_another_number_of_ranks_are_left_alone(tmp_path):
    checkpointed = build(DeviceMeshParameters(), tmp_path).inference._state.checkpointed
    assert "of_1_ranks" in checkpointed.state_dict()
    names = ("state.schedule.current_step", "state.of_2_ranks, data_parallel_shard 2.0.random.#document")
    metadata = Metadata(dict.fromkeys(names, BytesStorageMetadata()))
    state = checkpointed.prepare_to_load(CheckpointContents(tmp_path, metadata, "state"))
    assert sorted(state) == ["microbatch_pack_stream", "schedule", "task"]
    before = torch.get_rng_state()
    checkpointed.load_state_dict(filled(state, expanded(state)))
    (told,) = checkpointed.told
    assert (
        "start anew: they are those of another mesh, of_2_ranks, data_parallel_shard 2, and this job is of_1_ranks"
        in told
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert "of_1_ranks" in checkpointed.state_dict()


def test_a_complete_job_returns_at_once_and_says_how_to_run_it_anew(tmp_path, caplog):
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": "last_step"}}
    build(DeviceMeshParameters(), tmp_path, overrides=overrides).inference.infer()
    again = build(DeviceMeshParameters(), tmp_path, overrides=overrides)
    logger = again.inference._state.dist_context.logger
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO):
        again.inference.infer()
    logger.removeHandler(caplog.handler)
    assert again.task.outputs == {}
    assert again.task.num_finalized == 0
    assert "name another checkpointing.save_dir" in caplog.text


def test_the_checkpoints_of_a_training_job_are_refused(tmp_path):
    training = {"checkpointing": {"save_dir": str(tmp_path), "period_steps": 1}}
    build_job(DeviceMeshParameters(), tmp_path, total_steps=1, overrides=training).trainer.train()
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "job"), "period_steps": 1}}
    with pytest.raises(ValueError, match=r"checkpoints of a training job. Name a folder of its own"):
        build(DeviceMeshParameters(), tmp_path, overrides=overrides).inference.infer()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=["replicate", "shard"])
def test_a_handler_may_train_the_model_afterwards(tmp_path, mesh):
    job = build(mesh, tmp_path)
    job.inference.infer()
    job.model.train()
    job.model(samples().x, None).sum().backward()
    assert job.model.up.weight.grad is not None


def test_steps_are_traced_where_the_config_says_so(tmp_path):
    profiling = {"traces_dir": str(tmp_path / "traces"), "period_steps": 2, "warmup_steps": 1, "active_steps": 1}
    overrides = {"profiling": profiling, "schedule": {"total_steps": 4}}
    build(DeviceMeshParameters(), tmp_path, overrides=overrides).inference.infer()
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["step_2", "step_4"]


def test_all_problems_come_at_once_and_early(tmp_path):
    mesh = DeviceMeshParameters(data_parallel_shard=3)
    with pytest.raises(ValueError, match="cannot run as it is configured") as caught:
        build(mesh, tmp_path, overrides={"model_stage_factory": {"source_checkpoint": str(tmp_path)}})
    # 16 samples over 3 ranks in microbatches of 2: rounds of 6, so 12 or 18 fit.
    for part in ("needs 3 processes", "inference.model_stage_factory.source_checkpoint", "Use 12 or 18"):
        assert part in str(caught.value), part
    assert not dist.is_initialized()


def test_a_folder_that_cannot_be_written_to_is_found_early(tmp_path):
    (tmp_path / "file").write_text("")
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "file" / "saved"), "period_steps": 1}}
    with pytest.raises(ValueError, match=r"inference\.checkpointing\.save_dir .* cannot be written to"):
        build(DeviceMeshParameters(), tmp_path, overrides=overrides)


def test_data_that_ends_early_is_named(tmp_path):
    six_steps = {"schedule": {"total_steps": 6}}
    with pytest.raises(ValueError, match=r"total_steps \(6\) is more than the data has \(5\)"):
        build(DeviceMeshParameters(), tmp_path, overrides=six_steps)
    job = build(DeviceMeshParameters(), tmp_path, data_provider=lambda context: Stream([1, 1]), overrides=six_steps)
    with pytest.raises(RuntimeError, match=r"ended after step 2 of 6. Lower schedule.total_steps, or leave it out"):
        job.inference.infer()


class Stream:
    """Packs of single samples, as many per step as the list says for this rank."""

    def __init__(self, counts: list[int], total_steps: int | None = None) -> None:
        self.counts = counts
        self.total_steps = total_steps

    def __iter__(self):
        for step, count in enumerate(self.counts):
            first = 10 * step + (5 * dist.get_rank() if dist.is_initialized() else 0)
            yield tuple(collate([samples()[first + offset]]) for offset in range(count))

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def test_a_stream_without_an_end_needs_a_number_of_steps(tmp_path):
    def provider(context):
        return Stream([1, 1])

    with pytest.raises(ValueError, match=r"Set schedule\.total_steps"):
        build(DeviceMeshParameters(), tmp_path, data_provider=provider)
    job = build(DeviceMeshParameters(), tmp_path, data_provider=provider, overrides={"schedule": {"total_steps": 2}})
    job.inference.infer()
    assert sorted(job.task.outputs) == [0, 10]


@pytest.mark.world_size(2)
def test_replicas_may_have_different_numbers_of_microbatches(tmp_path):
    counts = [[1, 4], [3, 2]][dist.get_rank()]
    job = build(REPLICATE, tmp_path, data_provider=lambda context: Stream(counts, total_steps=2))
    job.inference.infer()
    assert sorted(of_all_ranks(job.task.outputs)) == [0, 5, 6, 7, 10, 11, 12, 13, 15, 16]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("counts", "message"),
    [([[2, 1], [2, 3]], "1 to 3 microbatches in step 2"), ([[2], [2, 3]], "0 to 3 microbatches in step 2")],
    ids=["uneven", "one ends early"],
)
def test_sharded_ranks_fail_together_instead_of_waiting(tmp_path, counts, message):
    own = counts[dist.get_rank()]
    job = build(SHARD, tmp_path, data_provider=lambda context: Stream(own, total_steps=2))
    with pytest.raises(ValueError, match=message):
        job.inference.infer()


@pytest.mark.world_size(2)
def test_replicas_keep_the_long_limit_as_they_drift_apart(tmp_path):
    limits_s: list[float | None] = []
    for number, mesh in enumerate(MESHES[2]):
        job = build(mesh, tmp_path / str(number), overrides={"timeout": {"init_timeout": 300, "step_timeout": 60}})
        job.inference.infer()
        limits_s.append(job.inference._state.timeouts._current_s)
    assert limits_s == [300, 60]


# Pipelines


@pytest.mark.world_size(4)
def test_a_pipeline_gives_the_outputs_of_a_plain_forward_pass(tmp_path):
    mesh = DeviceMeshParameters(pipeline_parallel=2, data_parallel_replicate=2)
    job = build(mesh, tmp_path, model_provider=PipelinedProvider(torch.float64))
    job.inference.infer()
    expected = build_whole_model(torch.float64)(samples().x, None).squeeze(1).tolist()
    has_outputs = mesh.build().pipeline_group.rank() == 1
    assert bool(job.task.outputs) == has_outputs
    outputs = of_all_ranks(job.task.outputs)
    assert sorted(outputs) == list(range(NUM_SAMPLES))
    assert [outputs[index] for index in range(NUM_SAMPLES)] == pytest.approx(expected, rel=0, abs=FP64_EXACT)


@pytest.mark.world_size(2)
def test_a_resumed_pipeline_knows_what_the_task_has_counted_on_the_last_stage(tmp_path):
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 2}}
    mesh = DeviceMeshParameters(pipeline_parallel=2)
    first = build(mesh, tmp_path, overrides=overrides, model_provider=PipelinedProvider(torch.float64))
    first.task.fails_at_step = 4
    with pytest.raises(CutShortError):
        first.inference.infer()
    second = build(mesh, tmp_path, overrides=overrides, model_provider=PipelinedProvider(torch.float64))
    second.inference.infer()
    # 8 microbatches a step: 2 steps of the first job, which all ranks are told of, and 3 of the second on the last stage.
    assert second.task.num_microbatches == 16 + 24 * (dist.get_rank() == 1)
