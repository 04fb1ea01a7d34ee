"""Jobs of the native trainer on Zephon's pipelines: saved by two data-parallel ranks with peers, resumed by 4, 2 and 1."""

import shutil
from functools import partial

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.zephon_provider import ZephonConfig, ZephonDataProvider
from tests.d9d.loop.run.regression_job import Batch, Data, build_job, build_model
from tests.d9d.loop.run.test_elastic_data import microbatches_of_all
from tests.harness.parity import FP64_EXACT

pytest.importorskip("zephon")
from tests.d9d.loop.test_zephon_provider import (
    LANES,
    NUM_SAMPLES,
    NUM_STEPS,
    PER_STEP,
    SAVED_AT,
    build,
    numbers_of,
    write_data,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zephon_job")
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """The microbatches of each step, as Zephon alone reads them on one process."""
    batches = iter(build(folder / "data").options(canonical_replicas=LANES))
    return [sorted(numbers_of(next(batches)) for _ in range(PER_STEP)) for _ in range(NUM_STEPS)]


def to_microbatch(batch) -> Batch:
    index = torch.tensor(numbers_of(batch))
    data = Data(NUM_SAMPLES, torch.float64)
    return Batch(index, data.x[index], data.y[index])


def train(mesh: DeviceMeshParameters, folder, saved, total_steps):
    config = ZephonConfig(
        lanes=LANES,
        microbatches_per_step=PER_STEP,
        run_id="job",
        coordination="dir",
        location=str(saved / "rounds"),
        total_steps=NUM_STEPS,
    )
    job = build_job(
        mesh,
        saved / f"log-{total_steps}",
        total_steps=total_steps,
        data_provider=ZephonDataProvider(partial(build, folder / "data"), config, to_microbatch),
        overrides={"checkpointing": {"save_dir": str(saved / "saved"), "period_steps": "last_step"}},
    )
    job.trainer.train()
    return job


def steps_of(job, mesh: DeviceMeshParameters, num_steps: int):
    return [sorted(map(tuple, step)) for step in microbatches_of_all(job.task, mesh, num_steps)]


def plain_losses(steps) -> list[float]:
    model, data = build_model(torch.float64), Data(NUM_SAMPLES, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number, step in enumerate(steps):
        index = torch.tensor(step).ravel()
        # The schedule of a job that is saved on the way ends there, and goes on anew with the other number of steps.
        total = SAVED_AT if number < SAVED_AT else NUM_STEPS
        optimizer.param_groups[0]["lr"] = 0.05 * (1.0 - 0.9 * number / total)
        optimizer.zero_grad()
        loss = (model(data.x[index], None) - data.y[index]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.world_size(4)
def test_two_data_parallel_ranks_with_peers_train(folder, expected):
    mesh = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2)
    job = train(mesh, folder, folder, SAVED_AT)
    assert steps_of(job, mesh, SAVED_AT) == expected[:SAVED_AT]
    if mesh.build().is_main_process:
        assert list(job.losses().values()) == pytest.approx(plain_losses(expected)[:SAVED_AT], rel=0, abs=FP64_EXACT)


def check_resume(mesh: DeviceMeshParameters, folder, expected, tmp_path):
    if mesh.build().is_main_process:
        shutil.copytree(folder / "saved", tmp_path / "saved")
    if mesh.build().is_distributed:
        torch.distributed.barrier()
    job = train(mesh, folder, tmp_path, NUM_STEPS)
    assert steps_of(job, mesh, NUM_STEPS - SAVED_AT) == expected[SAVED_AT:]
    if mesh.build().is_main_process:
        assert list(job.losses().values()) == pytest.approx(plain_losses(expected)[SAVED_AT:], rel=0, abs=FP64_EXACT)


@pytest.mark.world_size(4)
def test_four_data_parallel_ranks_go_on(folder, expected, tmp_path):
    check_resume(DeviceMeshParameters(data_parallel_shard=4), folder, expected, tmp_path)


@pytest.mark.world_size(2)
def test_two_ranks_go_on(folder, expected, tmp_path):
    check_resume(DeviceMeshParameters(data_parallel_replicate=2), folder, expected, tmp_path)


@pytest.mark.world_size(1)
def test_one_rank_goes_on(folder, expected, tmp_path):
    check_resume(DeviceMeshParameters(), folder, expected, tmp_path)
