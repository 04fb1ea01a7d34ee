"""What the launcher's variables mean, and which of them are refused."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from d9d.core import launch
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.launch import LaunchEnvironment

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        environment.setenv(name, value)


def test_a_plain_process_is_rank_0_of_1(environment: pytest.MonkeyPatch):
    read = LaunchEnvironment.read()
    assert (read.rank, read.world_size, read.local_rank, read.node_rank, read.num_nodes) == (0, 1, 0, 0, 1)
    assert read.master_addr == "localhost"


def test_rank_5_of_two_nodes_with_4_processes(environment: pytest.MonkeyPatch):
    set_all(environment, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="node-0")
    read = LaunchEnvironment.read()
    assert (read.rank, read.world_size, read.local_rank, read.node_rank, read.num_nodes) == (5, 8, 1, 1, 2)
    assert read.master_addr == "node-0"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "abc"}, ["RANK='abc'", "at least 0"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "at least 1"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1'"]),
        ({"RANK": "1.0", "WORLD_SIZE": "2"}, ["RANK='1.0'"]),
        ({"RANK": "", "WORLD_SIZE": "2"}, ["RANK=''"]),
        ({"RANK": "²", "WORLD_SIZE": "3"}, ["RANK='²'"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2 must be less than WORLD_SIZE=2"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set", "WORLD_SIZE=2"]),
        ({"RANK": "x", "WORLD_SIZE": "0", "LOCAL_RANK": "y"}, ["RANK='x'", "WORLD_SIZE='0'", "LOCAL_RANK='y'"]),
    ],
)
def test_malformed_variables_are_all_named(environment: pytest.MonkeyPatch, variables: dict[str, str], said: list[str]):
    set_all(environment, **variables)
    with pytest.raises(ValueError, match="launch environment") as error:
        LaunchEnvironment.read()
    assert all(part in str(error.value) for part in said), str(error.value)


def test_without_an_address_the_error_names_the_launcher(environment: pytest.MonkeyPatch):
    set_all(environment, RANK="0", WORLD_SIZE="2")
    with pytest.raises(ValueError, match=r"MASTER_ADDR and MASTER_PORT not set.*torchrun --nproc-per-node 2"):
        DeviceMeshParameters(data_parallel_shard=2).build()
    assert not dist.is_initialized()


def test_processes_that_do_not_come_are_told_where_to(environment: pytest.MonkeyPatch):
    set_all(environment, MASTER_ADDR="node-0", MASTER_PORT="29500")
    environment.setattr(launch, "_INIT_TIMEOUT", timedelta(0))
    with pytest.raises(
        RuntimeError, match=r"only 1 of 2 processes have come to node-0:29500 within 0:00:00\. See whether"
    ):
        launch._store_of_this_start(dist.HashStore(), 0, 2)


@pytest.mark.world_size(2)
def test_an_existing_group_decides(monkeypatch: pytest.MonkeyPatch):
    # Lightning starts processes without RANK, and makes the group itself.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    read = LaunchEnvironment.read()
    assert (read.rank, read.world_size) == (dist.get_rank(), 2)


_JOB = """
import torch
import torch.distributed as dist
from d9d.core.dist_context import DeviceMeshParameters
context = DeviceMeshParameters(data_parallel_shard=2).build()
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {context.rank} of {context.world_size}: {total.item()}", flush=True)
"""


def test_torchrun_starts_a_job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: 2.0" in done.stdout
    assert "rank 1 of 2: 2.0" in done.stdout
