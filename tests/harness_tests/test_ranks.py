"""What a test sees that runs on ranks: its group, its arguments, and nothing of the test before."""

import os
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Case:
    """A parameter whose class a rank knows only once it imported this module."""

    factor: int


@pytest.fixture
def greeting() -> str:
    return "hello"


def _check_all_reduce(expected: float) -> None:
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    assert value.item() == expected


@pytest.mark.world_size(1)
def test_one_rank_sums_its_own_value() -> None:
    _check_all_reduce(expected=1.0)


@pytest.mark.world_size(2)
def test_two_ranks_sum_their_values() -> None:
    _check_all_reduce(expected=1.0 + 2.0)


@pytest.mark.world_size(4)
def test_four_ranks_sum_their_values() -> None:
    _check_all_reduce(expected=1.0 + 2.0 + 3.0 + 4.0)


def test_unmarked_test_has_no_process_group() -> None:
    assert not dist.is_initialized()


@pytest.mark.world_size(4)
def test_ranks_see_the_variables_of_torchrun() -> None:
    rank = str(dist.get_rank())
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]) == (rank, rank, "0")
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("4", "4")
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert torch.get_num_threads() == 1


@pytest.mark.world_size(2)
def test_tmp_path_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    paths: list[str | None] = [None, None]
    dist.all_gather_object(paths, str(tmp_path))
    assert paths == [str(tmp_path)] * 2
    if dist.get_rank() == 0:
        (tmp_path / "file").write_text("from rank 0")
    dist.barrier()
    assert (tmp_path / "file").read_text() == "from rank 0"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", [Case(2), Case(5)], ids=lambda case: f"times_{case.factor}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_and_fixtures_reach_the_ranks(case: Case, dtype: torch.dtype, greeting: str) -> None:
    value = torch.full((), case.factor, dtype=dtype)
    dist.all_reduce(value)
    assert (value.item(), value.dtype, greeting) == (2 * case.factor, dtype, "hello")


@pytest.mark.world_size(2)
def test_rank_builds_its_own_monkeypatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", f"rank {dist.get_rank()}")
    assert sys.byteorder == f"rank {dist.get_rank()}"


@pytest.fixture
def variable_of_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_FIXTURE", "1")


@pytest.mark.world_size(2)
@pytest.mark.usefixtures("variable_of_fixture")
def test_environment_of_the_pytest_process_reaches_the_ranks() -> None:
    assert os.environ["SET_BY_FIXTURE"] == "1"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_test_leaves_nothing_to_the_next(turn: int) -> None:
    first_numbers = (torch.rand(()).item(), random.random(), float(np.random.rand()))
    expected_torch = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    assert first_numbers == (expected_torch, random.Random(0).random(), np.random.RandomState(0).rand())
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()
    assert "LEFT_BY_TEST" not in os.environ
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BY_TEST"] = "1"
    os.chdir("/")


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_groups_before", [0, 3])
def test_equal_meshes_of_two_tests_use_their_own_groups(num_groups_before: int) -> None:
    # Group names are counted. If DTensor kept the first test's mesh, the second would resolve a name that now belongs
    # to a group of ranks 0 and 1.
    for _ in range(num_groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = torch.arange(8.0).reshape(4, 2)
    sharded = DTensor.from_local(whole.chunk(4)[dist.get_rank()], mesh, [Shard(0), Shard(0)])
    doubled = sharded + sharded
    assert doubled.device_mesh is mesh
    assert torch.equal(doubled.redistribute(mesh, [Replicate(), Replicate()]).to_local(), 2 * whole)


@pytest.mark.world_size(2)
def test_ranks_may_start_processes_and_warn() -> None:
    warnings.warn("a warning is no failure", stacklevel=1)
    loader = torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.world_size(2)
def test_ranks_may_replace_the_default_group(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
    _check_all_reduce(expected=3.0)


@pytest.mark.world_size(2)
def test_ranks_skip_together() -> None:
    pytest.skip("a skip on all ranks is a skip")


@pytest.mark.xfail(strict=True, reason="a failure on ranks is an expected one")
@pytest.mark.world_size(1)
def test_expected_failure_on_a_rank() -> None:
    assert dist.get_world_size() == 2
