"""Layouts, local parts and compute leaves, against torch's own DTensor functions."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import (
    compute_leaf,
    groups_where,
    has_compute_leaf,
    is_sharded,
    like_parameter,
    local_tensor,
    set_compute_leaf,
    shard_of,
    trainable,
)


def test_plain_tensors_are_their_own_part():
    parameter = nn.Parameter(torch.ones(2))
    assert local_tensor(parameter) is parameter
    assert like_parameter(parameter.detach(), parameter).shape == (2,)
    assert groups_where(parameter, replicated=True) == groups_where(parameter, replicated=False) == ()
    assert not is_sharded(parameter)
    assert compute_leaf(parameter) is parameter
    assert not has_compute_leaf(parameter)
    with pytest.raises(ValueError, match=r"full shape \(2,\), got \(3,\)"):
        shard_of(torch.ones(3), parameter)


def test_leaves_and_trainable_parameters():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    leaf = nn.Parameter(torch.ones(1))
    set_compute_leaf(first, leaf)
    assert compute_leaf(first) is leaf
    assert has_compute_leaf(first)
    # Not compared by value: equal tensors are different parameters.
    assert [id(parameter) for parameter in trainable([first, second, leaf, first])] == [id(first), id(leaf)]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shape", [(1, 17), (6,), (5, 7), (4, 3)])
def test_the_part_of_a_rank_is_what_torch_distributes(shape: tuple[int, ...]):
    mesh = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)
    mesh = mesh["dp_replicate", "dp_cp_shard"]
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(len(shape) - 1)], [Replicate(), Replicate()]):
        distributed = distribute_tensor(full, mesh, placements)
        part = shard_of(full, distributed)
        assert torch.equal(part, distributed.to_local())
        assert part.numel() == 0 or part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        wrapped = like_parameter(part.clone(), distributed)
        assert isinstance(wrapped, DTensor)
        assert (wrapped.shape, wrapped.placements) == (distributed.shape, tuple(placements))
        assert torch.equal(wrapped.full_tensor(), full)
        assert like_parameter(part.double(), distributed).dtype == torch.float64


@pytest.mark.world_size(4)
def test_groups_by_placement():
    context = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    placements = [Replicate(), Replicate(), Shard(0), Replicate(), Replicate()]
    tensor = distribute_tensor(torch.ones(4), mesh, placements)
    rank = dist.get_rank()
    # Row-major 2 x 2: rank = 2 * replica + shard. Dimensions of size 1 (pp, cp_replicate, tp) are left out.
    [replicas] = groups_where(tensor, replicated=True)
    [shards] = groups_where(tensor, replicated=False)
    assert dist.get_process_group_ranks(replicas) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(shards) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert is_sharded(tensor)

    both = distribute_tensor(torch.ones(4), mesh, [Replicate()] * 5)
    assert groups_where(both, replicated=True) == (shards, replicas)  # innermost first
    partial = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()], run_check=False)
    with pytest.raises(NotImplementedError, match="neither Shard nor Replicate"):
        shard_of(torch.ones(4), partial)
