"""Tensors gathered to one rank, for all kinds of meshes and placements."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from d9d.model_state.io.boxes import LocalBox, local_boxes
from d9d.model_state.io.gathering import gather_to


def boxes_of_ranks(tensor: torch.Tensor) -> list[Sequence[LocalBox] | None]:
    boxes: list[Sequence[LocalBox] | None] = [None] * dist.get_world_size()
    try:
        own: Sequence[LocalBox] | None = local_boxes(tensor)
    except NotImplementedError:
        own = None
    dist.all_gather_object(boxes, own)
    return boxes


@pytest.mark.world_size(4)
def test_any_placement_on_any_rank():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    placements: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    for shape, dtype in [
        ((5, 6), torch.bfloat16),
        ((3, 2), torch.int64),
        ((1, 7), torch.float8_e5m2),
        ((0, 3), torch.bool),
    ]:
        whole = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
        for chosen in itertools.product(placements, placements):
            local = distribute_tensor(whole.float(), mesh, chosen, src_data_rank=None).to_local().to(dtype)
            tensor = DTensor.from_local(local, mesh, chosen, run_check=False, shape=whole.shape, stride=whole.stride())
            boxes = boxes_of_ranks(tensor)
            for target in range(4):
                found = gather_to(tensor, target, boxes.__getitem__)
                if dist.get_rank() == target:
                    assert found is not None
                    assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
                    assert torch.equal(found.float(), whole.float()), (chosen, target)


@pytest.mark.world_size(4)
def test_submeshes_sums_and_plain_tensors():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    whole = torch.arange(15.0).view(5, 3)
    for name in ("x", "y"):
        tensor = distribute_tensor(whole, mesh[name], [Shard(0)], src_data_rank=None)
        found = gather_to(tensor, 2, boxes_of_ranks(tensor).__getitem__)
        assert rank != 2 or (found is not None and torch.equal(found, whole))
    part = DTensor.from_local(whole * (rank % 2), mesh["y"], [Partial()], run_check=False)
    found = gather_to(part, 1, boxes_of_ranks(part).__getitem__)
    assert found is not None
    assert torch.equal(found, whole)
    assert gather_to(whole, 3, boxes_of_ranks(whole).__getitem__) is whole
