"""Jobs on elastic data: short steps, resuming on other meshes, refusals before a model is built, and peers that differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.auto.data import build_data_plan
from d9d.loop.control import BuildForwardInputsContext
from tests.d9d.loop.run.pipelined_job import PipelinedProvider, build_whole_model
from tests.d9d.loop.run.regression_job import (
    GLOBAL_BATCH_SIZE,
    Batch,
    Data,
    Provider,
    Task,
    build_job,
    build_model,
    collate,
)
from tests.d9d.loop.run.test_inference import build as build_inference
from tests.d9d.loop.run.test_inference import of_all_ranks
from tests.harness.parity import FP64_EXACT, named_full_parameters

SHARD_4 = DeviceMeshParameters(data_parallel_shard=4)
HYBRID = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2)
PIPELINE = DeviceMeshParameters(pipeline_parallel=2, data_parallel_replicate=2)
TENSOR = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2)
ONE_STREAM = DeviceMeshParameters(tensor_parallel=4)


def auto_data(num_samples: int, **changes: Any) -> AutoDataProvider:
    config = AutoDataConfig.model_validate(
        {
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "microbatch_size": 2,
            "num_workers": 0,
            "pin_memory": False,
            "shuffle": True,
            "tail": "short",
            **changes,
        }
    )
    return AutoDataProvider(lambda context: Data(num_samples, torch.float64), collate, config)


def by_samples(index: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(len(index)))


def plain_training(model: torch.nn.Module, steps: list[list[int]], num_samples: int) -> list[float]:
    """Train on the mean over all samples of each step, in plain PyTorch on one process."""
    data = Data(num_samples, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses: list[float] = []
    for number, samples in enumerate(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * (1.0 - 0.9 * number / len(steps))
        optimizer.zero_grad()
        loss = (model(data.x[samples], None) - data.y[samples]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


# Two whole steps of 16, and 1 or 3 samples in a third: two microbatches, or one, for up to four ranks.
@pytest.mark.world_size(4)
@pytest.mark.parametrize("rest", [1, 3])
@pytest.mark.parametrize("mesh", [SHARD_4, HYBRID, PIPELINE], ids=["shard", "hybrid", "pipeline"])
def test_training_on_short_steps_equals_one_process(tmp_path, mesh, rest):
    num_samples = 2 * GLOBAL_BATCH_SIZE + rest
    is_pipelined = mesh.has_pipeline_parallel
    provider = PipelinedProvider(torch.float64) if is_pipelined else None
    data = auto_data(num_samples, num_epochs=2)
    job = build_job(mesh, tmp_path, total_steps=6, weight=by_samples, data_provider=data, model_provider=provider)
    job.trainer.train()
    plan = build_data_plan(data._config, num_samples)
    steps = [[sample for sample in plan.step_samples(step).ravel().tolist() if sample >= 0] for step in range(6)]
    assert [len(step) for step in steps] == [16, 16, rest] * 2
    model = build_whole_model(torch.float64) if is_pipelined else build_model(torch.float64)
    losses = plain_training(model, steps, num_samples)
    if dist.get_rank() == 0:
        assert list(job.losses().values()) == pytest.approx(losses, rel=0, abs=FP64_EXACT)
        # Idle microbatches are in no metric.
        assert list(job.logged("samples").values()) == [16, 16, rest] * 2
    if not is_pipelined:
        for name, value in named_full_parameters(job.model).items():
            torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=0, atol=FP64_EXACT)


class WatchingTask(Task):
    """Remembers which microbatches it was told to be idle."""

    def build_forward_inputs(self, ctx: BuildForwardInputsContext[Batch]) -> Any:
        self.idle = [*vars(self).get("idle", []), ctx.is_idle]
        return super().build_forward_inputs(ctx)


@pytest.mark.world_size(2)
def test_tasks_know_idle_microbatches(tmp_path):
    """8 microbatches of the first step for two ranks, and one of the second."""
    job = build_job(
        DeviceMeshParameters(data_parallel_replicate=2),
        tmp_path,
        total_steps=2,
        weight=by_samples,
        data_provider=auto_data(GLOBAL_BATCH_SIZE + 1, num_epochs=1),
        task_class=WatchingTask,
    )
    job.trainer.train()
    assert job.task.idle == [False] * 4 + [dist.get_rank() == 1]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("num_samples", "microbatch_size"), [(35, 2), (5, 1), (1, 4)])
@pytest.mark.parametrize("mesh", [SHARD_4, HYBRID, PIPELINE], ids=["shard", "hybrid", "pipeline"])
def test_inference_sees_each_sample_once(tmp_path, mesh, num_samples, microbatch_size):
    data = auto_data(num_samples, microbatch_size=microbatch_size)
    provider = PipelinedProvider(torch.float64) if mesh.has_pipeline_parallel else None
    # The task refuses to see a sample twice, and the gathering of ranks as well.
    job = build_inference(mesh, tmp_path, data_provider=data, model_provider=provider)
    job.inference.infer()
    outputs = of_all_ranks(job.task.outputs)
    model = build_whole_model(torch.float64) if mesh.has_pipeline_parallel else build_model(torch.float64)
    expected = model(Data(num_samples, torch.float64).x, None).squeeze(1).tolist()
    assert sorted(outputs) == list(range(num_samples))
    assert [outputs[index] for index in range(num_samples)] == pytest.approx(expected, rel=0, abs=FP64_EXACT)


def microbatches_of_all(task: Task, mesh: DeviceMeshParameters, num_steps: int) -> list[list[list[int]]]:
    """Microbatches of each step in the order of data-parallel ranks, which their peers must have read as well."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (mesh.build().dp_rank, task.read))
    streams: dict[int, list[list[int]]] = {}
    for dp_rank, read in gathered:
        assert streams.setdefault(dp_rank, read) == read
    per_rank = len(streams[0]) // num_steps
    steps = range(0, len(streams[0]), per_rank)
    return [[micro for rank in sorted(streams) for micro in streams[rank][at : at + per_rank]] for at in steps]


@pytest.mark.world_size(4)
def test_a_run_goes_through_meshes_and_reads_what_it_would_on_one(tmp_path):
    # Epochs of 3.75 steps, so that positions cross them.
    num_samples = 60
    data = auto_data(num_samples, tail="wrap", num_epochs=None)
    plan = build_data_plan(data._config, num_samples)
    done = 0
    for mesh, num_steps in ((TENSOR, 2), (SHARD_4, 3), (ONE_STREAM, 1), (TENSOR, 4), (HYBRID, 2)):
        until = done + num_steps
        overrides = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": "last_step"}}
        job = build_job(mesh, tmp_path / str(done), total_steps=until, data_provider=data, overrides=overrides)
        job.trainer.train()
        expected = [plan.step_samples(step).tolist() for step in range(done, until)]
        assert microbatches_of_all(job.task, mesh, num_steps) == expected
        done = until


class BuildsNothing(Provider):
    """A model that must not be built."""

    def __init__(self) -> None:
        super().__init__(torch.float64, 0.0)

    def initialize_model_stage(self, context):
        raise AssertionError("a model was built")


def checkpointed(folder: Path) -> dict[str, Any]:
    return {"checkpointing": {"save_dir": str(folder), "period_steps": "last_step"}}


def train_three_steps(folder: Path, data: AutoDataProvider) -> None:
    build_job(
        DeviceMeshParameters(), folder, total_steps=3, data_provider=data, overrides=checkpointed(folder)
    ).trainer.train()


@pytest.mark.parametrize(
    ("num_samples", "changes", "message"),
    [
        (60, {"seed": 1}, r"Changed: seed \(checkpoint: 0, now: 1\)\."),
        (61, {}, r"num_samples \(checkpoint: 60, now: 61\), fingerprint"),
        (60, {"shuffle": False}, r"shuffle \(checkpoint: True, now: False\)"),
        (60, {"tail": "drop"}, r"tail \(checkpoint: wrap, now: drop\)"),
        (60, {"skip_steps": [[2, 2]]}, r"skip_steps \(steps 2 to 2\) come too late: 3 steps are done"),
    ],
    ids=str,
)
def test_other_data_is_refused_before_the_model_is_built(tmp_path, num_samples, changes, message):
    train_three_steps(tmp_path, auto_data(60, tail="wrap"))
    with pytest.raises(ValueError, match=message):
        build_job(
            DeviceMeshParameters(),
            tmp_path,
            data_provider=auto_data(num_samples, **{"tail": "wrap", **changes}),
            model_provider=BuildsNothing(),
            overrides=checkpointed(tmp_path),
        )


class OldStream:
    """Keeps its position as `AutoDataProvider` did before its data was elastic."""

    has_rank_invariant_state = True
    total_steps = 3

    def __iter__(self):
        data = Data(60, torch.float64)
        for _ in range(3):
            yield (collate([data[0]]),)

    def state_dict(self):
        return {"version": 1, "consumed_steps": 3, "seed": 0}

    def load_state_dict(self, state_dict):
        pass


def test_a_checkpoint_of_an_earlier_release_is_refused_before_the_model_is_built(tmp_path):
    train_three_steps(tmp_path, lambda context: OldStream())
    with pytest.raises(ValueError, match=r"\(consumed_steps, seed, version\) is not one of this stream.*what saved it"):
        build_job(
            DeviceMeshParameters(),
            tmp_path,
            data_provider=auto_data(60),
            model_provider=BuildsNothing(),
            overrides=checkpointed(tmp_path),
        )


class StreamOfRank(OldStream):
    has_rank_invariant_state = False


def test_a_position_per_rank_is_refused_before_the_model_is_built(tmp_path):
    train_three_steps(tmp_path, lambda context: StreamOfRank())
    with pytest.raises(ValueError, match=r"no data position 'all_ranks', only \['dp_0'\]"):
        build_job(
            DeviceMeshParameters(),
            tmp_path,
            data_provider=auto_data(60),
            model_provider=BuildsNothing(),
            overrides=checkpointed(tmp_path),
        )


def test_another_global_batch_changes_the_number_of_steps_left(tmp_path):
    train_three_steps(tmp_path, auto_data(160, tail="wrap"))
    # 48 of 160 samples are read. The other 112 are 14 steps of 8.
    data = auto_data(160, tail="wrap", global_batch_size=8)
    job = build_job(
        DeviceMeshParameters(), tmp_path, total_steps=None, data_provider=data, overrides=checkpointed(tmp_path)
    )
    assert job.trainer._state.schedule.total_steps == 3 + 14
    job.trainer.train()
    assert len(job.task.read) == 14 * 4


# -- peers


class TellsSeedZero:
    """Gives streams whose states look equal on all ranks: only their samples tell that they are not."""

    def __init__(self, provider: AutoDataProvider) -> None:
        self._provider = provider

    def __call__(self, context: Any) -> Any:
        stream = self._provider(context)
        state_dict = stream.state_dict
        stream.state_dict = lambda: {**state_dict(), "seed": 0}
        return stream


@pytest.mark.world_size(2)
def test_ranks_with_other_seeds_are_refused_before_the_model_is_built(tmp_path):
    with pytest.raises(ValueError, match=r"data\.seed: 0 on rank 0; 1 on rank 1"):
        build_job(
            DeviceMeshParameters(data_parallel_replicate=2),
            tmp_path,
            total_steps=4,
            data_provider=auto_data(64, seed=dist.get_rank()),
            model_provider=BuildsNothing(),
        )


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", [TENSOR, ONE_STREAM], ids=["two streams", "one stream"])
def test_a_rank_that_reads_other_samples_is_named_on_all_ranks(tmp_path, mesh):
    overrides = {"data_agreement": {"period_steps": 2}}
    data = TellsSeedZero(auto_data(64, seed=1 if dist.get_rank() == 3 else 0))
    job = build_job(mesh, tmp_path, total_steps=4, data_provider=data, overrides=overrides)
    peers = r"\[2\]" if mesh.data_parallel == 2 else r"\[0, 1, 2\]"
    with pytest.raises(
        RuntimeError, match=rf"in step 2, ranks \[3\] ask for other sample numbers than ranks {peers}, though"
    ):
        job.trainer.train()
    assert len(job.task.read) == 8 // mesh.data_parallel


@pytest.mark.world_size(4)
def test_peers_that_agree_go_on(tmp_path):
    overrides = {"data_agreement": {"period_steps": 1}}
    job = build_job(TENSOR, tmp_path, total_steps=3, data_provider=auto_data(64), overrides=overrides)
    job.trainer.train()
    inference = build_inference(TENSOR, tmp_path / "inference", data_provider=auto_data(64), overrides=overrides)
    inference.inference.infer()
    assert len(inference.task.outputs) == 32


def test_a_stream_that_cannot_tell_its_samples_is_refused(tmp_path):
    overrides = {"data_agreement": {"period_steps": 5}}
    with pytest.raises(ValueError, match=r"data_agreement\.period_steps \(5\) needs a data stream that knows"):
        build_job(
            DeviceMeshParameters(),
            tmp_path,
            total_steps=3,
            data_provider=lambda context: OldStream(),
            overrides=overrides,
        )
