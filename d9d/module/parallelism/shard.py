"""Shard the parameters of a module with FSDP2, which only moves data: it sums, and never averages."""
# DTensor has no public way to restate a layout without communication (torch 2.13)
# pyright: reportPrivateUsage=false

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from d9d.core.fsdp_internals import count_unused_as_zero
from d9d.module.parallelism.replicate import parallelize_replicate, replicated_parameters


def parallelize_fsdp(module: nn.Module, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    """Shard the parameters of a module over a one-dimensional mesh with FSDP2, in place.

    The module is one FSDP unit: its parameters are gathered before its forward pass and again before its backward
    pass. Those that nested calls have sharded already stay in their own units. FSDP sums gradients over the mesh; the
    gradient manager divides by the loss weight. A parameter that a rank did not use counts there as a zero gradient.

    Args:
        module: Module to change; on the meta device or with values, which must be equal on all ranks of the mesh.
        mesh: Mesh with one dimension.
        *args: Further positional arguments of ``fully_shard``.
        **kwargs: Keyword arguments of ``fully_shard``: ``mp_policy``, ``reshard_after_forward``, ``offload_policy``.

    Raises:
        ValueError: If the mesh has more than one dimension.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_fsdp shards over one mesh dimension, got {mesh.mesh_dim_names}. "
            f"Pass one of them, or use parallelize_hsdp to replicate over the others."
        )
    # Any: these are torch's own arguments, passed through.
    ignored = replicated_parameters(module) | set(kwargs.pop("ignored_params", None) or ())
    fully_shard(module, *args, mesh=mesh, ignored_params=ignored or None, **kwargs)
    assert isinstance(module, FSDPModule)  # fully_shard has just made it one
    module.set_gradient_divide_factor(1.0)
    # Without this FSDP multiplies by 1 inside the collective, which gloo does not offer.
    module.set_force_sum_reduction_for_comms(True)
    count_unused_as_zero(module)


def parallelize_hsdp(
    module: nn.Module, mesh: DeviceMesh, shard_dim: str = "dp_cp_shard", *fsdp_args: Any, **fsdp_kwargs: Any
) -> None:
    """Shard the parameters of a module along one mesh dimension and replicate them along the others, in place.

    Parameters become DTensors over the whole mesh, ``Shard`` along `shard_dim` and ``Replicate`` elsewhere. FSDP works
    along `shard_dim` alone; the gradient manager sums over the other dimensions, in buckets and overlapped with the
    backward pass. Where `shard_dim` has size 1, the module is replicated and FSDP stays out of the way.

    Args:
        module: Module to change; see `parallelize_fsdp`.
        mesh: Mesh of a domain, or a slice of it, that contains `shard_dim`.
        shard_dim: Name of the dimension to shard along.
        *fsdp_args: Further positional arguments of ``fully_shard``.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``.

    Raises:
        ValueError: If the mesh has no dimension `shard_dim`.
    """
    names = mesh.mesh_dim_names or ()
    if shard_dim not in names:
        raise ValueError(f"the mesh has the dimensions {names}, not {shard_dim!r}. Pass shard_dim as one of them.")
    if mesh.size(names.index(shard_dim)) == 1:
        parallelize_replicate(module, mesh)
        return
    before = set(module.parameters())
    parallelize_fsdp(module, mesh[shard_dim] if mesh.ndim > 1 else mesh, *fsdp_args, **fsdp_kwargs)
    if mesh.ndim > 1:
        for parameter in set(module.parameters()) - before:
            _extend_placements(parameter, mesh, names.index(shard_dim))


def _extend_placements(parameter: nn.Parameter, mesh: DeviceMesh, shard_index: int) -> None:
    """Let a parameter that FSDP sharded over one dimension record its layout on the whole mesh.

    FSDP reads the layout back from the parameter when it starts, and gives it to the gradients. (torch 2.11 to 2.14:
    `FSDPParam.reset_sharded_param`.)
    """
    assert isinstance(parameter, DTensor)  # FSDP has just sharded it
    spec = parameter._spec
    placements = tuple(spec.placements[0] if dim == shard_index else Replicate() for dim in range(mesh.ndim))
    parameter._spec = DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
