"""Traces of selected steps."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.profiling import Profiler
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.profiler import JobProfiler
from d9d.loop.config import JobScheduleConfig, ProfilingConfig


def run(profiler: Profiler, start_step: int, num_steps: int) -> None:
    with profiler.open(start_step) as profile:
        for _ in range(num_steps):
            torch.ones(2).sum()
            profile.step()


def build(folder: Path, mesh: DeviceMeshParameters | None = None) -> Profiler:
    return Profiler(
        save_dir=folder,
        period_steps=3,
        warmup_steps=1,
        active_steps=1,
        record_shapes=True,
        with_stack=False,
        dist_context=(mesh or DeviceMeshParameters()).build(),
    )


def test_each_cycle_leaves_a_trace_of_its_last_step(tmp_path: Path):
    run(build(tmp_path), start_step=0, num_steps=6)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.tar.gz"))
    assert files == [f"step_{step}/rank-0-coord-local-trace.tar.gz" for step in (3, 6)]
    with tarfile.open(tmp_path / files[0]) as archive:
        (member,) = archive.getmembers()
        trace = json.load(archive.extractfile(member))  # type: ignore[arg-type]
    assert any("sum" in event["name"] for event in trace["traceEvents"])


def test_a_resumed_job_goes_on_counting(tmp_path: Path):
    run(build(tmp_path), start_step=100, num_steps=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_103"]


@pytest.mark.world_size(2)
def test_each_rank_writes_a_file_with_its_coordinates(tmp_path: Path):
    run(build(tmp_path, DeviceMeshParameters(data_parallel_shard=2)), start_step=0, num_steps=3)
    torch.distributed.barrier()
    names = sorted(path.name for path in (tmp_path / "step_3").iterdir())
    assert names == ["rank-0-coord-0-0-0-0-0-0-trace.tar.gz", "rank-1-coord-0-0-1-0-0-0-trace.tar.gz"]


class Stream:
    total_steps = 3


@pytest.mark.parametrize("is_on", [True, False])
def test_a_job_is_profiled_if_the_config_says_so(tmp_path: Path, is_on: bool):
    schedule = JobSchedule(JobScheduleConfig(), Stream())  # type: ignore[arg-type]
    config = ProfilingConfig(traces_dir=tmp_path, period_steps=2, warmup_steps=0, active_steps=1)
    profiler = JobProfiler(DeviceMeshParameters().build(), config if is_on else None, schedule)
    with profiler.open() as profile:
        assert (profile is not None) == is_on
