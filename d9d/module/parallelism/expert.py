"""Distribute the experts of a layer over ranks."""

from torch.distributed.device_mesh import DeviceMesh

from d9d.module.block.moe import MoELayer
from d9d.module.parallelism.replicate import parallelize_replicate
from d9d.module.parallelism.style import ShardMoESparseExpertsParallel


def parallelize_expert_parallel(module: MoELayer, mesh_experts: DeviceMesh, expert_shard_dim: str = "ep_shard") -> None:
    """Distribute the experts of a layer over one mesh dimension, with its router on every rank, in place.

    Weights of experts become DTensors, ``Shard(0)`` along `expert_shard_dim` and ``Replicate`` elsewhere; those of the
    router ``Replicate`` everywhere. The code of the layer computes with plain local tensors, as under
    `parallelize_replicate`. Tokens are exchanged along `expert_shard_dim`: all its ranks must call the layer together,
    those without tokens too.

    A rank's gradient of an expert has the tokens of all ranks along `expert_shard_dim`; the gradient manager sums it
    over the other data dimensions, and the router's over all. So both equal the gradients of one process for the sum
    of the ranks' losses. A shared expert stays as it is: it is a dense layer.

    Args:
        module: Layer to change, before FSDP or replication takes its parameters; on the meta device or with values,
            which must be equal on all ranks.
        mesh_experts: Mesh of the expert domain, or a slice of it with all dimensions of ranks that have different data.
        expert_shard_dim: Name of the dimension to distribute along.

    Raises:
        ValueError: If the mesh has no such dimension, or its size does not divide the number of experts.
    """
    ShardMoESparseExpertsParallel(expert_shard_dim).apply(module, mesh_experts)
    parallelize_replicate(module.router, mesh_experts)
