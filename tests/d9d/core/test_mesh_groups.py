"""Ranks and their peers, by hand count for 16 ranks; and the pool that makes each group once."""

import math

import pytest
import torch.distributed as dist

from d9d.core.mesh_groups import GroupPool, RankLayout

SHAPE = {"pp": 2, "rep": 2, "shard": 2, "tp": 2}
"""Strides 8, 4, 2, 1."""


def layout(rank: int) -> RankLayout:
    return RankLayout(shape=SHAPE, rank=rank)


# 11 = 8 + 2 + 1 = (1, 0, 1, 1)
@pytest.mark.parametrize(
    ("rank", "coordinates"), [(0, (0, 0, 0, 0)), (5, (0, 1, 0, 1)), (11, (1, 0, 1, 1)), (15, (1, 1, 1, 1))]
)
def test_coordinates(rank: int, coordinates: tuple[int, ...]):
    assert tuple(layout(rank).coordinate(name) for name in SHAPE) == coordinates


@pytest.mark.parametrize(
    ("names", "peers"),
    [
        ((), (11,)),
        (("tp",), (10, 11)),
        (("shard",), (9, 11)),
        (("rep",), (11, 15)),
        (("pp",), (3, 11)),
        (("rep", "shard"), (9, 11, 13, 15)),
        (("shard", "rep"), (9, 11, 13, 15)),
        (("pp", "tp"), (2, 3, 10, 11)),
        (tuple(SHAPE), tuple(range(16))),
    ],
)
def test_peers_of_rank_11(names: tuple[str, ...], peers: tuple[int, ...]):
    assert layout(11).peers(names) == peers


@pytest.mark.parametrize("names", [("pp",), ("rep", "shard"), ("pp", "shard"), ("tp",)])
def test_peers_part_the_ranks(names: tuple[str, ...]):
    groups = {layout(rank).peers(names) for rank in range(16)}
    size = math.prod(SHAPE[name] for name in names)
    assert len(groups) == 16 // size
    assert sorted(rank for group in groups for rank in group) == list(range(16))
    assert all(rank in layout(rank).peers(names) for rank in range(16))


@pytest.mark.world_size(4)
def test_one_group_for_the_same_ranks():
    pool = GroupPool()
    rank = dist.get_rank()
    pair = (0, 1) if rank < 2 else (2, 3)
    group = pool.group(pair, "first name")
    assert pool.group(pair, "second name") is group
    assert pool.group((0, 1, 2, 3), "all") is dist.group.WORLD
    assert pool.groups == (dist.group.WORLD, group)
    assert dist.get_process_group_ranks(group) == list(pair)
