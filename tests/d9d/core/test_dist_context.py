"""Domains, groups, limits and errors of a context, on hand-counted meshes."""

import logging
import math
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from d9d.core.dist_context import (
    BATCH_DOMAIN,
    DENSE_DOMAIN,
    EXPERT_DOMAIN,
    FLAT_DOMAIN,
    REGULAR_DOMAIN,
    DeviceMeshParameters,
    build_dist_logger,
)

DOMAINS = (REGULAR_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN, BATCH_DOMAIN, FLAT_DOMAIN)
STEP_LIMIT_S = 1.0
"""Limit of a collective in the test of limits."""


def ranks_along(mesh: torch.distributed.DeviceMesh) -> dict[str, list[int]]:
    """Ranks that each dimension's group joins, for dimensions larger than 1."""
    return {
        name: dist.get_process_group_ranks(mesh.get_group(name))
        for name in mesh.mesh_dim_names
        if mesh.size(mesh.mesh_dim_names.index(name)) > 1
    }


# ----- one process -----


def test_degree_one_is_a_plain_process():
    context = DeviceMeshParameters().build()
    assert not dist.is_initialized()
    assert not context.is_distributed
    assert context.groups == ()
    assert context.data_group is None
    assert (context.rank, context.world_size, context.dp_rank, context.dp_size) == (0, 1, 0, 1)
    assert context.is_main_process
    assert context.is_local_main_process
    context.wait_world()
    context.set_timeout(1.0)
    with context.main_process_first(), context.local_main_process_first():
        pass
    with pytest.raises(RuntimeError, match=r"mesh_for\('dense'\): all parallelism degrees are 1"):
        context.mesh_for(DENSE_DOMAIN)


def test_degrees_and_products():
    params = DeviceMeshParameters(
        pipeline_parallel=2,
        data_parallel_replicate=3,
        data_parallel_shard=5,
        context_parallel_shard=7,
        tensor_parallel=2,
    )
    assert params.world_size == 2 * 3 * 5 * 7 * 2
    assert params.data_ranks == 3 * 5 * 7
    assert params.data_parallel == 15
    assert params.is_distributed
    assert params.has_pipeline_parallel
    assert params.has_tensor_parallel
    assert not params.has_context_parallel_replicate
    assert not params.has_expert_parallel


def test_all_bad_degrees_come_in_one_error():
    with pytest.raises(ValidationError) as error:
        DeviceMeshParameters(pipeline_parallel=0, tensor_parallel=-2, data_parallel_shard="x", shards=2)
    fields = {entry["loc"][0] for entry in error.value.errors()}
    assert fields == {"pipeline_parallel", "tensor_parallel", "data_parallel_shard", "shards"}
    assert "greater than or equal to 1" in str(error.value)


def test_expert_parallel_must_divide():
    with pytest.raises(ValidationError, match=r"expert_parallel \(4\) must divide .* = 2 x 3 x 1 x 1 = 6") as error:
        DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=3, expert_parallel=4)
    assert "Valid values: 1, 2, 3, 6." in str(error.value)
    DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=3, expert_parallel=6)


@pytest.mark.parametrize(
    ("degrees", "world", "said", "not_said"),
    [
        ({"data_parallel_shard": 4}, 2, ["needs 4", "runs 2", "Start 4", "data_parallel_shard: 2"], []),
        ({}, 2, ["needs 1", "all degrees are 1", "runs 2", "data_parallel_shard: 2"], []),
        # 6 needs shard x replicate = 6: shard 3 with replicate 2, or replicate 3 with shard 2.
        (
            {"data_parallel_shard": 2, "data_parallel_replicate": 2},
            6,
            ["needs 4", "runs 6", "data_parallel_shard: 3", "data_parallel_replicate: 3"],
            [],
        ),
        # 3 is not a multiple of 2 x 2: nothing fits by changing one degree.
        (
            {"data_parallel_shard": 2, "pipeline_parallel": 2, "tensor_parallel": 2},
            3,
            ["needs 8", "runs 3"],
            ["or set"],
        ),
        # expert_parallel 4 does not divide 2, so shard 2 would be refused in turn.
        ({"data_parallel_shard": 4, "expert_parallel": 4}, 2, ["needs 4", "runs 2"], ["or set"]),
    ],
)
def test_another_number_of_processes(degrees: dict[str, int], world: int, said: list[str], not_said: list[str]):
    with pytest.raises(ValueError, match="processes") as error:
        DeviceMeshParameters(**degrees).check_world_size(world)
    assert all(part in str(error.value) for part in said), str(error.value)
    assert not any(part in str(error.value) for part in not_said), str(error.value)


def test_the_number_of_processes_is_checked_before_any_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"needs 4 processes .* but the job runs 1"):
        DeviceMeshParameters(data_parallel_shard=4).build()
    assert not dist.is_initialized()


def test_log_lines_carry_the_qualifier(capsys: pytest.CaptureFixture[str]):
    logger = build_dist_logger("pp:1-tp:0", logging.INFO)
    logger.info("step %d", 3)
    logger.debug("hidden")
    build_dist_logger("pp:1-tp:0", logging.INFO).info("once")
    written = capsys.readouterr()
    lines = (written.out + written.err).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("[d9d] [pp:1-tp:0]")
    assert lines[0].endswith("INFO - step 3")


_SIXTEEN = """
import sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from d9d.core.dist_context import DeviceMeshParameters

rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
context = DeviceMeshParameters(
    pipeline_parallel=2, data_parallel_replicate=2, data_parallel_shard=2, tensor_parallel=2
).build()
ranks = [tuple(dist.get_process_group_ranks(group)) for group in context.groups]
print(repr(ranks))
for domain in ("regular", "dense", "expert", "batch", "flat"):
    mesh = context.mesh_for(domain)
    coordinate = mesh.get_coordinate()
    groups = {
        name: (mesh.size(dim), coordinate[dim], dist.get_process_group_ranks(mesh.get_group(name)))
        for dim, name in enumerate(mesh.mesh_dim_names)
    }
    print(repr((domain, groups)))
dist.destroy_process_group()
"""

# Rank 11 = 8 + 2 + 1, so pp 1, replicate 0, shard 1, tp 1; peers by adding and taking away the strides 8, 4, 2, 1.
_PP, _REP, _SHARD, _TP, _SELF = [3, 11], [11, 15], [9, 11], [10, 11], [11]
_RANK_11 = {
    "regular": {
        "pp": (2, 1, _PP),
        "dp_replicate": (2, 0, _REP),
        "dp_shard": (2, 1, _SHARD),
        "cp_shard": (1, 0, _SELF),
        "cp_replicate": (1, 0, _SELF),
        "tp": (2, 1, _TP),
    },
    "dense": {
        "pp": (2, 1, _PP),
        "dp_replicate": (2, 0, _REP),
        "dp_cp_shard": (2, 1, _SHARD),
        "cp_replicate": (1, 0, _SELF),
        "tp": (2, 1, _TP),
    },
    "expert": {
        "pp": (2, 1, _PP),
        "ep_replicate": (4, 1, [9, 11, 13, 15]),
        "ep_shard": (1, 0, _SELF),
        "tp": (2, 1, _TP),
    },
    "batch": {"pp": (2, 1, _PP), "dp": (4, 1, [9, 11, 13, 15]), "cp": (1, 0, _SELF), "tp": (2, 1, _TP)},
    "flat": {"world": (16, 11, list(range(16)))},
}


def test_sixteen_ranks_share_their_groups():
    done = subprocess.run(
        [sys.executable, "-c", _SIXTEEN, "11"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # The lines are repr() of tuples and dicts that this test's own script printed.
    first, *domains = [eval(line) for line in done.stdout.splitlines()]
    assert len(first) == len(set(first)), "two groups over the same ranks"
    # The world, pp, replicate, shard, tp, dp, this rank alone, and the ranks with the same tp.
    assert set(first) == {
        tuple(range(16)),
        tuple(_PP),
        tuple(_REP),
        tuple(_SHARD),
        tuple(_TP),
        tuple(_SELF),
        (9, 11, 13, 15),
        (1, 3, 5, 7, 9, 11, 13, 15),
    }
    assert dict(domains) == _RANK_11


# ----- ranks -----


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (
            {"data_parallel_replicate": 2, "data_parallel_shard": 2},
            {
                REGULAR_DOMAIN: {"dp_replicate": [[0, 2], [1, 3]], "dp_shard": [[0, 1], [2, 3]]},
                DENSE_DOMAIN: {"dp_replicate": [[0, 2], [1, 3]], "dp_cp_shard": [[0, 1], [2, 3]]},
                EXPERT_DOMAIN: {"ep_replicate": [[0, 1, 2, 3]]},
                BATCH_DOMAIN: {"dp": [[0, 1, 2, 3]]},
                FLAT_DOMAIN: {"world": [[0, 1, 2, 3]]},
            },
        ),
        (
            {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
            {
                REGULAR_DOMAIN: {"dp_shard": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]},
                DENSE_DOMAIN: {"dp_cp_shard": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]},
                EXPERT_DOMAIN: {"ep_shard": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]},
                BATCH_DOMAIN: {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]},
                FLAT_DOMAIN: {"world": [[0, 1, 2, 3]]},
            },
        ),
        (
            {"data_parallel_replicate": 2, "context_parallel_shard": 2, "expert_parallel": 2},
            {
                REGULAR_DOMAIN: {"dp_replicate": [[0, 2], [1, 3]], "cp_shard": [[0, 1], [2, 3]]},
                DENSE_DOMAIN: {"dp_replicate": [[0, 2], [1, 3]], "dp_cp_shard": [[0, 1], [2, 3]]},
                EXPERT_DOMAIN: {"ep_replicate": [[0, 2], [1, 3]], "ep_shard": [[0, 1], [2, 3]]},
                BATCH_DOMAIN: {"dp": [[0, 2], [1, 3]], "cp": [[0, 1], [2, 3]]},
                FLAT_DOMAIN: {"world": [[0, 1, 2, 3]]},
            },
        ),
        (
            {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
            {
                REGULAR_DOMAIN: {"pp": [[0, 2], [1, 3]], "dp_shard": [[0, 1], [2, 3]]},
                DENSE_DOMAIN: {"pp": [[0, 2], [1, 3]], "dp_cp_shard": [[0, 1], [2, 3]]},
                EXPERT_DOMAIN: {"pp": [[0, 2], [1, 3]], "ep_shard": [[0, 1], [2, 3]]},
                BATCH_DOMAIN: {"pp": [[0, 2], [1, 3]], "dp": [[0, 1], [2, 3]]},
                FLAT_DOMAIN: {"world": [[0, 1, 2, 3]]},
            },
        ),
    ],
    ids=["2x2", "shard-tp-ep", "replicate-cp-ep", "pp-shard-ep"],
)
def test_domains_of_four_ranks(degrees: dict[str, int], expected: dict[str, dict[str, list[list[int]]]]):
    context = DeviceMeshParameters(**degrees).build()
    rank = context.rank
    for domain in DOMAINS:
        mesh = context.mesh_for(domain)
        assert math.prod(mesh.shape) == 4
        mine = {name: next(ranks for ranks in parts if rank in ranks) for name, parts in expected[domain].items()}
        assert ranks_along(mesh) == mine, domain
        # The groups work: the sum over ranks along each dimension.
        for name, ranks in mine.items():
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=mesh.get_group(name))
            assert total == sum(ranks)
    # Attention over context-parallel ranks has a group that nothing else uses; all others are one for one set of ranks.
    own = [context.mesh_for(BATCH_DOMAIN).get_group("cp")] if context.mesh_params.context_parallel > 1 else []
    ranks = [tuple(dist.get_process_group_ranks(group)) for group in context.groups if group not in own]
    assert len(ranks) == len(set(ranks)) == len(context.groups) - len(own)
    assert context.is_main_process == (rank == 0)


@pytest.mark.world_size(4)
def test_slices_and_sizes_of_a_mesh():
    context = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build()
    dense = context.mesh_for(DENSE_DOMAIN)
    assert dense.mesh_dim_names == ("pp", "dp_replicate", "dp_cp_shard", "cp_replicate", "tp")
    part = dense["dp_replicate", "dp_cp_shard"]
    assert part.shape == (2, 2)
    assert tuple(part.get_coordinate()) == (context.rank // 2, context.rank % 2)
    assert dense["dp_cp_shard"].get_group() is dense.get_group("dp_cp_shard")
    # One communicator for the same ranks, whatever domain names them.
    regular = context.mesh_for(REGULAR_DOMAIN)
    assert dense.get_group("dp_cp_shard") is regular.get_group("dp_shard")
    assert context.mesh_for(FLAT_DOMAIN).get_group() is dist.group.WORLD
    assert (context.dp_rank, context.dp_size) == (context.rank, 4)
    assert dist.get_process_group_ranks(context.data_group) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"no domain 'sparse'. Valid: regular, dense, batch, flat, expert"):
        context.mesh_for("sparse")


@pytest.mark.world_size(4)
def test_tensor_parallel_peers_read_the_same_data():
    context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    assert (context.dp_rank, context.dp_size) == (context.rank // 2, 2)
    assert dist.get_process_group_ranks(context.data_group) == [context.rank % 2, context.rank % 2 + 2]


@pytest.mark.world_size(4)
def test_two_contexts_in_one_process():
    for degrees in ({"data_parallel_shard": 4}, {"data_parallel_replicate": 2, "data_parallel_shard": 2}):
        context = DeviceMeshParameters(**degrees).build()
        total = torch.ones(1)
        dist.all_reduce(total, group=context.mesh_for(DENSE_DOMAIN).get_group("dp_cp_shard"))
        assert total == degrees["data_parallel_shard"]
    assert dist.is_initialized()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", ["sub-group", "world"])
def test_limits_reach_every_group(kind: str):
    context = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build()
    context.set_timeout(STEP_LIMIT_S)
    group = context.mesh_for(DENSE_DOMAIN).get_group("dp_cp_shard") if kind == "sub-group" else dist.group.WORLD
    if context.rank in (1, 3):
        time.sleep(2 * STEP_LIMIT_S)  # does not come, and stays alive: it must be the limit that ends the wait
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        dist.all_reduce(torch.ones(1), group=group)
    assert 0.5 * STEP_LIMIT_S < time.monotonic() - start < 2 * STEP_LIMIT_S


@pytest.mark.world_size(4)
def test_subgroups_of_a_pipeline():
    context = DeviceMeshParameters(pipeline_parallel=4).build()
    # A chain: each rank is in two of the groups, and gets to them after a different number of others.
    chain = [(0, 1, 3), (0, 2), (1, 2), (2, 3)]
    for ranks in chain + chain:
        group = context.pipeline_subgroup(ranks)
        if context.rank not in ranks:
            assert group is None
            continue
        assert group is not None
        assert tuple(dist.get_process_group_ranks(group)) == ranks
        assert group in context.groups
        total = torch.tensor(context.rank)
        dist.all_reduce(total, group=group)
        assert total == sum(ranks)
    num_groups = len(context.groups)
    assert context.pipeline_subgroup((0, 1, 2, 3)) is not None
    assert len(context.groups) == num_groups


@pytest.mark.world_size(4)
def test_subgroups_of_two_pipelines():
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_replicate=2).build()
    group = context.pipeline_subgroup((0, 1))
    assert group is not None
    assert dist.get_process_group_ranks(group) == [context.dp_rank, context.dp_rank + 2]


def test_one_rank_has_no_subgroup():
    with pytest.raises(RuntimeError, match="pipeline_subgroup: all parallelism degrees are 1"):
        DeviceMeshParameters().build().pipeline_subgroup((0,))


@pytest.mark.world_size(2)
def test_a_longer_limit_replaces_a_shorter_one():
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    context.set_timeout(0.2)
    context.set_timeout(30)
    if context.rank == 1:
        time.sleep(0.6)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.world_size(2)
def test_main_process_comes_first(tmp_path):
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    for first in (context.main_process_first, context.local_main_process_first):
        path = tmp_path / first.__name__
        with first():
            if context.rank == 0:
                time.sleep(0.2)
                path.write_text("written by rank 0")
            else:
                assert path.read_text() == "written by rank 0"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rank_does_not_hold_up_the_others(failing: int):
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    start = time.monotonic()
    try:
        with context.main_process_first():
            if context.rank == failing:
                raise OSError("disk full")
    except OSError:
        assert context.rank == failing
    context.wait_world()
    assert time.monotonic() - start < 5
