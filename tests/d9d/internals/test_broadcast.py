"""One rank's values on all ranks, bit by bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from d9d.internals.broadcast import broadcast_packed

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def build_tensors(rank: int) -> list[torch.Tensor]:
    """Of sizes that leave nothing aligned, with a value of the rank."""
    tensors: list[torch.Tensor] = []
    for dtype in DTYPES:
        tensors += [torch.full(shape, rank, dtype=torch.float32).to(dtype) for shape in ((3,), (), (0, 2), (1, 5))]
        tensors.append((torch.arange(6.0).view(2, 3) + rank).to(dtype).t())
    return tensors


@pytest.mark.world_size(2)
@pytest.mark.parametrize("source", [0, 1])
def test_all_have_the_values_of_one_rank(source: int):
    assert dist.group.WORLD is not None
    tensors = build_tensors(dist.get_rank())
    broadcast_packed(tensors, dist.group.WORLD, source)
    for tensor, expected in zip(tensors, build_tensors(source), strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.stride() == expected.stride()
        assert torch.equal(tensor.to(torch.complex64), expected.to(torch.complex64))


@pytest.mark.world_size(2)
def test_distributed_tensors_are_left_out():
    assert dist.group.WORLD is not None
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, [Shard(0)])
    broadcast_packed([sharded], dist.group.WORLD)
    assert torch.equal(sharded.to_local(), torch.full((2,), float(dist.get_rank())))
