"""Tensors that leave and come back as the same objects."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.offload import (
    DEFAULT_SLEEP_TAGS,
    MovableMemory,
    Offloadable,
    OffloadContext,
    OnloadContext,
    SleepTag,
    offload_tensor,
    onload_tensor,
)

CPU = torch.device("cpu")


def test_a_parameter_keeps_its_identity():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    kept = offload_tensor(parameter, pin_memory=True)
    assert parameter.numel() == 0
    onload_tensor(parameter, kept, device=CPU)
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert parameter.requires_grad
    parameter.sum().backward()
    optimizer.step()
    assert parameter.tolist() == [[-1, 0, 1], [2, 3, 4]]
    # The host copy is the caller's: later updates must not reach it.
    assert kept.host.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_strides_come_back():
    tensor = torch.arange(6.0).view(2, 3).t()
    kept = offload_tensor(tensor, pin_memory=False)
    onload_tensor(tensor, kept, device=CPU)
    assert tensor.stride() == (1, 3)
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_memory_comes_back_shared_as_it_was():
    context = DeviceMeshParameters().build()
    whole = torch.arange(6.0)
    part, unknown = whole[2:4], whole.view(2, 3).t()
    memory = MovableMemory()
    for _ in range(2):
        memory.offload([part, whole, whole], OffloadContext(dist_context=context, pin_memory=True))
        assert memory.is_offloaded
        assert (len(part), len(whole), unknown.untyped_storage().nbytes()) == (0, 0, 0)
        memory.onload(OnloadContext(dist_context=context))
        assert not memory.is_offloaded
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    part += 10
    assert unknown.tolist() == [[0, 13], [1, 4], [12, 5]]


@pytest.mark.world_size(2)
def test_only_the_local_shard_of_a_dtensor_moves():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    kept = offload_tensor(tensor, pin_memory=False)
    first = 4 * dist.get_rank()
    assert kept.host.tolist() == [first, first + 1, first + 2, first + 3]
    assert tensor.to_local().numel() == 0
    onload_tensor(tensor, kept, device=CPU)
    assert isinstance(tensor, DTensor)
    assert tensor.full_tensor().tolist() == list(range(8))


def test_tags_and_protocol():
    assert set(SleepTag) == {"tensor_states", "comms"}
    assert SleepTag.TENSOR_STATES in DEFAULT_SLEEP_TAGS

    class Sleeper:
        def offload(self, ctx):
            pass

        def onload(self, ctx):
            pass

        def is_offloaded(self):
            return False

    assert isinstance(Sleeper(), Offloadable)
