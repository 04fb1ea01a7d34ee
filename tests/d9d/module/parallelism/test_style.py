"""Parallel styles of our own: random masks of parts, local tensors of distributed parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.core.dist_ops import all_gather
from d9d.internals.determinism import set_step_seeds
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.parallelism.api import parallelize_tensor
from d9d.module.parallelism.style import DropoutOfParts, ToLocalParallel
from tests.harness.parity import assert_close_tree, named_full_gradients, named_full_parameters

SIZE, DROPPED = 4096, 0.25
SIX_SIGMA = 6 * (DROPPED * (1 - DROPPED) / SIZE) ** 0.5


def dropout_of_parts(context: DistributedContext, *, inplace: bool = False) -> nn.Dropout:
    dropout = nn.Dropout(DROPPED, inplace=inplace)
    parallelize_tensor(dropout, DropoutOfParts(), context.mesh_for(DENSE_DOMAIN)["tp"])
    return dropout


@pytest.mark.world_size(4)
def test_dropped_elements_over_a_mesh():
    """Of parts, other elements on each rank; of what peers have in common the same, before and after that."""
    context = DeviceMeshParameters(data_parallel_replicate=2, tensor_parallel=2).build()
    parts, common = dropout_of_parts(context), nn.Dropout(DROPPED)
    set_step_seeds(context, 3)
    x = torch.ones(SIZE, dtype=torch.float64)
    masks = [all_gather(each(x), dist.group.WORLD) for each in (common, parts, common)]
    for before_or_after in (masks[0], masks[2]):
        first, peer, other, others_peer = before_or_after
        assert torch.equal(first, peer)
        assert torch.equal(other, others_peer)
        assert not torch.equal(first, other)
    assert all(not torch.equal(masks[1][one], masks[1][two]) for one in range(4) for two in range(one))
    values = masks[1][0]
    assert set(values.tolist()) == {0.0, 1 / (1 - DROPPED)}
    assert (values == 0).double().mean().item() == pytest.approx(DROPPED, abs=SIX_SIGMA)


@pytest.mark.world_size(2)
def test_a_dropout_of_parts_is_a_dropout():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    dropout, in_place = dropout_of_parts(context), dropout_of_parts(context, inplace=True)
    x = torch.randn(SIZE)
    assert copy.deepcopy(dropout).eval()(x) is x
    torch.manual_seed(dist.get_rank())
    state = torch.get_rng_state()
    kept = dropout(x)
    torch.set_rng_state(state)
    given = x.clone()
    assert in_place(given) is given
    assert torch.equal(given, kept)
    dropout.p = 1.0
    assert not dropout(x).any()
    with pytest.raises(NotImplementedError, match=r"DropoutOfParts is for nn\.Dropout, not for a Linear"):
        parallelize_tensor(nn.Linear(2, 2), DropoutOfParts(), context.mesh_for(DENSE_DOMAIN)["tp"])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_drops_the_same(use_reentrant: bool):
    dropout = dropout_of_parts(DeviceMeshParameters(tensor_parallel=2).build())
    x = torch.ones(SIZE, requires_grad=True)
    output = checkpoint(dropout, x, use_reentrant=use_reentrant)
    output.sum().backward()
    assert torch.equal(x.grad, output.detach())


@pytest.mark.world_size(2)
def test_local_tensors_of_replicated_parameters():
    mesh = DeviceMeshParameters(data_parallel_replicate=2).build().mesh_for(DENSE_DOMAIN)["dp_replicate"]
    single, inputs = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    dist.broadcast(inputs, 0)
    for parameter in single.parameters():
        dist.broadcast(parameter.data, 0)
    split = copy.deepcopy(single)
    parallelize_module(split, mesh, ToLocalParallel((Replicate(),), (Partial(),)))
    assert type(split.weight) is nn.Parameter
    assert all(parameter.placements == (Replicate(),) for parameter in split.parameters())
    synchronizer = GradientSynchronizer([list(split.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    split(inputs[2 * dist.get_rank() :][:2]).sin().sum().backward()
    synchronizer.wait()
    single(inputs).sin().sum().backward()
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), rtol=0, atol=1e-12)


@pytest.mark.world_size(2)
def test_local_tensors_of_shards():
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    whole = nn.Linear(3, 4, bias=False)
    dist.broadcast(whole.weight.data, 0)
    split = copy.deepcopy(whole)
    parallelize_tensor(split, ToLocalParallel((Shard(0),), (Shard(0),)), mesh)
    x = torch.randn(5, 3)
    assert torch.equal(split(x), x @ whole.weight.chunk(2)[dist.get_rank()].T)
    assert_close_tree(named_full_parameters(split), named_full_parameters(whole), rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("dimension", "parameter", "gradient"),
    [
        ("data_parallel_replicate", (Replicate(),), (Replicate(),)),
        ("tensor_parallel", (Replicate(),), (Partial(),)),
        ("tensor_parallel", (Shard(0),), (Replicate(),)),
        ("tensor_parallel", (Partial(),), (Partial(),)),
        ("tensor_parallel", (Shard(0), Replicate()), (Shard(0), Replicate())),
    ],
)
def test_gradients_that_nobody_would_sum(dimension: str, parameter: tuple, gradient: tuple):
    context = DeviceMeshParameters(**{dimension: 2}).build()
    mesh = context.mesh_for(DENSE_DOMAIN)["tp" if dimension == "tensor_parallel" else "dp_replicate"]
    with pytest.raises(ValueError, match="give Shard or Replicate for each dimension"):
        parallelize_module(nn.Linear(2, 2), mesh, ToLocalParallel(parameter, gradient))
