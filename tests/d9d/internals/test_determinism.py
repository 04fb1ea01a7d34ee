"""Seeds of a process, and which ranks share them."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.determinism import seeded, set_seeds, set_step_seeds


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**63 - 1])
def test_all_generators_follow_the_seed(seed):
    dist_context = DeviceMeshParameters().build()
    set_seeds(dist_context, seed)
    first = draw()
    set_seeds(dist_context, seed)
    assert draw() == first
    set_seeds(dist_context, (seed + 1) % 2**63)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def draws_of_all_ranks(distinct_dim: str) -> list[float]:
    dist_context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build()
    set_seeds(dist_context, 5, distinct_seed_mesh_dim=distinct_dim)
    own = torch.rand(1)
    parts = [torch.empty(1) for _ in range(4)]
    dist.all_gather(parts, own)
    return [part.item() for part in parts]


@pytest.mark.world_size(4)
def test_stages_differ_and_replicas_agree():
    a, b, c, d = draws_of_all_ranks("pp")
    assert a == b
    assert c == d
    assert a != c


@pytest.mark.world_size(4)
def test_another_dimension_may_differ():
    a, b, c, d = draws_of_all_ranks("dp_shard")
    assert a == c
    assert b == d
    assert a != b


@pytest.mark.world_size(4)
@pytest.mark.parametrize("outer", ["data_parallel_replicate", "pipeline_parallel"])
def test_dropout_is_that_of_tensor_parallel_peers_and_of_nobody_else(outer):
    set_step_seeds(DeviceMeshParameters(tensor_parallel=2, **{outer: 2}).build(), 5)
    mask = torch.nn.functional.dropout(torch.ones(64), 0.5)
    masks = [torch.empty(64) for _ in range(4)]
    dist.all_gather(masks, mask)
    assert torch.equal(masks[0], masks[1])  # tp is the innermost dimension
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.world_size(2)
def test_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'dp'.*pp, dp_replicate, dp_shard"):
        set_seeds(DeviceMeshParameters(data_parallel_shard=2).build(), 1, distinct_seed_mesh_dim="dp")


def test_a_seeded_block_draws_alike_and_leaves_the_generators_as_they_were():
    set_seeds(DeviceMeshParameters().build(), 1)
    undisturbed = draw()
    set_seeds(DeviceMeshParameters().build(), 1)
    cpu = torch.device("cpu")
    with seeded(5, cpu):
        inside = draw()
    with seeded(5, cpu):
        assert draw() == inside
    with seeded(6, cpu):
        assert all(a != b for a, b in zip(draw(), inside, strict=True))
    assert draw() == undisturbed
