"""The pool keeps its ranks, adds to them, replaces them after a failure, and is cheap."""

import gc
import itertools
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness.messages import TestCall, TestSource
from tests.harness.pool import RankPool
from tests.harness.rank_state import count_gloo_loops

_ROOT = Path(__file__).parents[2]


def body_that_prints_pid() -> None:
    """Run on ranks."""
    dist.all_reduce(torch.ones(1))
    print(os.getpid())


def body_that_fails_on_rank_1() -> None:
    """Run on ranks."""
    assert dist.get_rank() != 1


def body_that_keeps_its_mesh_in_caches() -> None:
    """Run on ranks. DTensor caches how it distributes an operation, by mesh."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 4, requires_grad=True), mesh, [Shard(0)])
    (weight @ weight).redistribute(mesh, [Replicate()]).sum().backward()


def body_that_prints_loops_of_groups() -> None:
    """Run on ranks."""
    print(count_gloo_loops())


def body_that_prints_number_of_spared_objects() -> None:
    """Run on ranks."""
    print(gc.get_freeze_count())


def body_that_imports() -> None:
    """Run on ranks: a module that nothing else imports."""
    import mailbox  # noqa: F401


def body_that_leaves_groups() -> None:
    """Run on ranks: 40 groups that outlive the test."""
    _LEFT.extend(dist.new_group([dist.get_rank()], use_local_synchronization=True) for _ in range(40))


def body_that_leaves_a_busy_thread() -> None:
    """Run on ranks."""

    def count() -> None:
        for _ in itertools.count():
            pass

    threading.Thread(target=count, daemon=True).start()


_LEFT: list[object] = []

_needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are not seen in /proc here")


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(["--noconftest", "--capture=no", f"--rootdir={_ROOT}"])
    yield pool
    pool.close()


def _call(function: str) -> TestCall:
    source = TestSource(
        path=__file__,
        function=function,
        import_mode="importlib",
        root=str(_ROOT),
        consider_namespace_packages=False,
    )
    return TestCall(source=source, arguments=pickle.dumps({}), rank_fixtures=(), environment=dict(os.environ))


def _pids(pool: RankPool, world_size: int) -> list[int]:
    reports = pool.run(_call("body_that_prints_pid"), world_size, timeout_s=60)
    assert [report.kind for report in reports] == ["passed"] * world_size
    return [int(report.output) for report in reports]


def test_ranks_are_kept_and_added_to(pool: RankPool) -> None:
    two = _pids(pool, 2)
    four = _pids(pool, 4)
    assert len(set(four)) == 4
    assert four[:2] == two
    assert _pids(pool, 1) == four[:1]
    assert os.getpid() not in four


def test_all_ranks_are_replaced_after_a_failure(pool: RankPool) -> None:
    before = _pids(pool, 4)
    reports = pool.run(_call("body_that_fails_on_rank_1"), 2, timeout_s=60)
    assert [report.kind for report in reports] == ["passed", "failed"]
    assert not set(before) & set(_pids(pool, 4))


@_needs_proc
def test_groups_end_with_their_test(pool: RankPool) -> None:
    loops = []
    for _ in range(2):
        reports = pool.run(_call("body_that_prints_loops_of_groups"), 2, timeout_s=60)
        loops.append([int(report.output) for report in reports])
        reports = pool.run(_call("body_that_keeps_its_mesh_in_caches"), 2, timeout_s=60)
        assert [report.kind for report in reports] == ["passed"] * 2
    # Only the group of the test itself.
    assert loops == [[1, 1], [1, 1]]


@_needs_proc
def test_ranks_that_keep_many_groups_are_replaced(pool: RankPool) -> None:
    before = _pids(pool, 2)
    reports = pool.run(_call("body_that_leaves_groups"), 2, timeout_s=60)
    assert [report.kind for report in reports] == ["passed"] * 2
    assert not set(before) & set(_pids(pool, 2))


@_needs_proc
def test_ranks_that_are_busy_without_a_task_are_replaced(pool: RankPool) -> None:
    before = _pids(pool, 2)
    reports = pool.run(_call("body_that_leaves_a_busy_thread"), 2, timeout_s=60)
    assert [report.kind for report in reports] == ["passed"] * 2
    time.sleep(0.5)  # in which the ranks wait for a task
    assert _pids(pool, 2) == before  # noticed with the next task, after which the ranks are replaced
    assert not set(before) & set(_pids(pool, 2))


def test_collections_skip_what_tests_have_imported(pool: RankPool) -> None:
    counts = []
    for body in ("body_that_prints_pid", "body_that_prints_pid", "body_that_imports"):
        pool.run(_call(body), 1, timeout_s=60)
        [report] = pool.run(_call("body_that_prints_number_of_spared_objects"), 1, timeout_s=60)
        counts.append(int(report.output))
    assert counts[1] <= counts[0] < counts[2]


def test_a_test_costs_less_than_a_start_of_torch(pool: RankPool) -> None:
    _pids(pool, 2)
    start = time.monotonic()
    for _ in range(5):
        _pids(pool, 2)
    # 0.04 s on two free cores. The limit leaves room for a busy machine, but not for an import of torch (2 s).
    assert (time.monotonic() - start) / 5 < 0.5


def test_closed_pool_leaves_no_files() -> None:
    pool = RankPool([])
    directory = pool._directory
    assert directory.is_dir()
    pool.close()
    assert not directory.exists()
