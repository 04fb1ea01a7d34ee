"""Boxes of shards against torch's own distribution of tensors."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from d9d.core.placement import local_tensor
from d9d.model_state.io.boxes import LocalBox, local_boxes
from d9d.model_state.mapper.pieces import Box

SHAPES = [(1, 17), (6,), (5, 7), (0, 3), (8, 4, 3)]


def put_together(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy what the boxes say from the global tensor; every element must be written once."""
    local = torch.full(local_tensor(tensor).shape, -1, dtype=full.dtype)
    for box in local_boxes(tensor):
        assert math.prod(box.box.shape) > 0
        assert (local[box.local.slices] == -1).all()
        local[box.local.slices] = full[box.box.slices]
    return local


def test_a_plain_tensor_is_one_box():
    whole = Box((0, 0), (2, 3))
    assert local_boxes(torch.ones(2, 3)) == (LocalBox(whole, whole),)
    assert local_boxes(nn.Parameter(torch.ones(2, 3).t())) == (LocalBox(Box((0, 0), (3, 2)), Box((0, 0), (3, 2))),)
    assert local_boxes(torch.tensor(1.0)) == (LocalBox(Box((), ()), Box((), ())),)
    assert local_boxes(torch.ones(0, 3)) == ()


@pytest.mark.world_size(4)
def test_all_placements_on_two_mesh_dimensions():
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in [*SHAPES, ()]:
        full = torch.arange(math.prod(shape)).view(shape)
        choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(choices, choices):
            distributed = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert torch.equal(put_together(full, distributed), distributed.to_local()), (shape, placements)


@pytest.mark.world_size(4)
def test_uneven_and_empty_shards_of_three_ranks():
    # The fourth rank is outside of the mesh.
    mesh = DeviceMesh("cpu", [0, 1, 2])
    for shape in [(1, 17), (6,), (5, 7), (0, 3), (4,), (2,)]:
        full = torch.arange(math.prod(shape)).view(shape)
        for dim in range(len(shape)):
            distributed = distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)
            assert torch.equal(put_together(full, distributed), distributed.to_local()), (shape, dim)
            assert dist.get_rank() < 3 or local_boxes(distributed) == ()


@pytest.mark.world_size(4)
def test_rows_that_are_cut_from_right_to_left():
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, split in itertools.product([(8, 3), (9, 2), (7,), (5, 7), (3,), (1, 17)], (2, 3)):
        full = torch.arange(math.prod(shape)).view(shape)
        for other in (Shard(0), Replicate()):
            placements = [_StridedShard(0, split_factor=split), other]
            distributed = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert torch.equal(put_together(full, distributed), distributed.to_local()), (shape, placements)


@pytest.mark.world_size(4)
def test_fsdp_over_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5))
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(put_together(expected[name], parameter), parameter.to_local()), name
    weight = module[0].weight
    assert isinstance(weight, DTensor)
    # The tp rank has four neighbouring rows, of which each dp rank keeps two.
    rank = dist.get_rank()
    start = 4 * (rank % 2) + 2 * (rank // 2)
    assert [part.box for part in local_boxes(weight)] == [Box((start, 0), (2, 6))]


@pytest.mark.world_size(2)
def test_sums_that_are_still_to_be_made_are_refused():
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="Sum it first"):
        local_boxes(partial)


@pytest.mark.world_size(2)
def test_shards_that_were_not_cut_as_torch_does():
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(1 + 2 * dist.get_rank())
    odd = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    with pytest.raises(NotImplementedError, match="not cut as torch cuts them"):
        local_boxes(odd)
