"""Split layers below FSDP: layouts that put the whole together again, for sizes that the mesh does not divide."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor, shard_of
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.parallelism.api import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, parallelize_tensor
from d9d.module.parallelism.tensor import align_gradients
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_gradients, named_full_parameters

WHOLE = {"output_layouts": Replicate()}


def build(size):
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Embedding(size, 6), nn.Linear(6, size), nn.Linear(size, 6), nn.LayerNorm(6))
    layers[2].bias.requires_grad_(False)
    return layers.double()


def split(module, mesh):
    styles = (
        RowwiseParallel(input_layouts=Replicate()),
        ColwiseParallel(**WHOLE),
        RowwiseParallel(input_layouts=Replicate()),
    )
    for layer, style in zip(module, styles, strict=False):
        parallelize_tensor(layer, style, mesh["tp"])
    assert not module[2].bias.requires_grad


def fsdp_alone(module, mesh):
    parallelize_fsdp(module, mesh["dp_cp_shard"])


def hybrid(module, mesh):
    parallelize_hsdp(module[1], mesh["dp_replicate", "dp_cp_shard", "cp_replicate", "tp"])
    parallelize_hsdp(module, mesh["dp_replicate", "dp_cp_shard", "cp_replicate", "tp"])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shard", [fsdp_alone, hybrid])
@pytest.mark.parametrize("size", [3, 8, 9])
def test_shards_of_split_layers(shard, size):
    """With 9 rows, peers have 5 and 4, and of these the two shards have 3 + 2 and 2 + 2."""
    mesh = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)
    module, reference = build(size), build(size)
    split(module, mesh)
    shard(module, mesh)
    expected = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            local_tensor(parameter), shard_of(expected[name].detach(), parameter), rtol=0, atol=0
        )
    assert_close_tree(named_full_parameters(module), named_full_parameters(reference), atol=0, rtol=0)
    if size == 9:
        rows = torch.tensor([5, 4])[mesh.get_local_rank("tp")]
        assert len(local_tensor(module[1].weight)) == (rows + 1 - mesh.get_local_rank("dp_cp_shard")) // 2

    synchronizer = GradientSynchronizer([list(module.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    tokens = torch.tensor([[0, 1], [2, size - 1]])
    module(tokens[mesh.get_local_rank("dp_cp_shard")]).square().sum().backward()
    synchronizer.wait()
    reference(tokens).square().sum().backward()
    gradients = named_full_gradients(reference)
    assert_close_tree(named_full_gradients(module), gradients, atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(4)
def test_the_mesh_must_have_the_dimension_of_the_split():
    mesh = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)
    module = build(8)
    split(module, mesh)
    with pytest.raises(ValueError, match=r"split along tp, which the mesh of parallelize_hsdp lacks"):
        parallelize_hsdp(module, mesh["dp_replicate", "dp_cp_shard"])
    with pytest.raises(ValueError, match="one mesh dimension"):
        parallelize_tensor(module, ColwiseParallel(), mesh["dp_cp_shard", "tp"])


@pytest.mark.world_size(4)
def test_gradients_are_summed_over_data_and_never_over_peers():
    """Four ranks of which two have the same data: the sum is over two."""
    context = DeviceMeshParameters(data_parallel_replicate=2, tensor_parallel=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    data_groups = (mesh.get_group("dp_replicate"),)
    everywhere, plain, over_peers = (nn.Linear(1, 1, bias=False) for _ in range(3))
    parallelize_replicate(everywhere, mesh)
    parallelize_tensor(over_peers, RowwiseParallel(input_layouts=Replicate()), mesh["tp"])
    for groups, layers in ((data_groups, (everywhere, plain, over_peers)), ((), (everywhere,))):
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        synchronizer = GradientSynchronizer([parameters], 1, plain_groups=groups)
        synchronizer.bind()
        synchronizer.set_required_accumulations(1)
        x = torch.full((1, 1), 1.0 + mesh.get_local_rank("dp_replicate"))
        sum(layer(x) for layer in layers).sum().backward()
        synchronizer.wait()
        for parameter in parameters:
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            assert gradient.item() == 1.0 + 2.0
        synchronizer.unbind()


@pytest.mark.world_size(2)
def test_partial_gradients_are_put_together():
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]), requires_grad=False)
    align_gradients([weight, nn.Parameter(torch.ones(2))])
    weight.requires_grad_(True)
    x = DTensor.from_local(torch.full((1, 2), 1.0 + dist.get_rank()), mesh, [Shard(0)])
    (weight * x).sum().backward()
    assert weight.grad.placements == (Replicate(),)
    # 1 from the first rank and 2 from the second.
    torch.testing.assert_close(local_tensor(weight.grad), torch.full((2,), 3.0))
