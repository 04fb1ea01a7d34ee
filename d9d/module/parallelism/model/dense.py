"""Meshes of a model, and how what tensor parallelism leaves of its dense layers is sharded or replicated."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, DistributedContext
from d9d.module.parallelism.shard import parallelize_hsdp

__all__ = ["context_mesh", "distribute_dense", "tensor_mesh"]

_TENSOR_DIM = "tp"


def tensor_mesh(dist_context: DistributedContext) -> DeviceMesh:
    """Return the mesh that layers are split over, of one dimension; its size may be 1."""
    return dist_context.mesh_for(DENSE_DOMAIN)[_TENSOR_DIM]


def context_mesh(dist_context: DistributedContext) -> DeviceMesh:
    """Return the mesh of the ranks that have parts of the same sequences, of one dimension; its size may be 1."""
    return dist_context.mesh_for(BATCH_DOMAIN)["cp"]


# Any: these are torch's own arguments, passed through.
def distribute_dense(module: nn.Module, dist_context: DistributedContext, **fsdp_kwargs: Any) -> None:
    """Shard a module over the ranks with different data, or replicate it where these are not to shard, in place.

    Args:
        module: Module to change, after its layers were split. It becomes one unit of FSDP, but for units within it.
        dist_context: Topology of the job.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``.
    """
    mesh = dist_context.mesh_for(DENSE_DOMAIN)
    parallelize_hsdp(module, mesh["dp_replicate", "dp_cp_shard", "cp_replicate", _TENSOR_DIM], **fsdp_kwargs)
