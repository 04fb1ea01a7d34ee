"""Shard the parameters of a module with FSDP2, which only moves data: it sums, and never averages.

[Note: shards of split layers]
Where tensor parallelism has split a parameter before, FSDP shards what each rank has left, so that along a common tensor
dimension the tensor-parallel cut is the outer one. Torch records that as a strided shard on a mesh with the shard
dimension first, and loses elements of sizes that the mesh does not divide when it puts the whole tensor together (2.11
to 2.13). Here the mesh of the layout has the shard dimension last, where it is an ordinary `Shard`, for any size.
"""
# DTensor has no public way to restate a layout without communication (torch 2.13)
# pyright: reportPrivateUsage=false

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from d9d.core.fsdp_internals import count_unused_as_zero
from d9d.module.parallelism.replicate import parallelize_replicate, replicate_numbers, replicated_parameters


def parallelize_fsdp(module: nn.Module, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    """Shard the parameters of a module over a one-dimensional mesh with FSDP2, in place.

    The module is one FSDP unit: its parameters are gathered before its forward pass and again before its backward
    pass. Those that nested calls have sharded already stay in their own units. FSDP sums gradients over the mesh; the
    gradient manager divides by the loss weight. A parameter that a rank did not use counts there as a zero gradient, also if
    no rank used it: its optimizer state begins then, and weight decay moves it. Freeze what is never used. Parameters without
    dimensions, such as a temperature, are replicated.

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
    left_alone = set(kwargs.pop("ignored_params", None) or ())
    replicate_numbers(module, mesh, left_alone)
    before = set(module.parameters())
    ignored = replicated_parameters(module) | left_alone
    fully_shard(module, *args, mesh=mesh, ignored_params=ignored or None, **kwargs)
    assert isinstance(module, FSDPModule)  # fully_shard has just made it one
    module.set_gradient_divide_factor(1.0)
    # Without this FSDP multiplies by 1 inside the collective, which gloo does not offer.
    module.set_force_sum_reduction_for_comms(True)
    count_unused_as_zero(module)
    for parameter in set(module.parameters()) - before:
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            _record_layout(parameter, _with_shards_last(parameter.device_mesh, _only_name(mesh)))


def parallelize_hsdp(
    module: nn.Module, mesh: DeviceMesh, shard_dim: str = "dp_cp_shard", *fsdp_args: Any, **fsdp_kwargs: Any
) -> None:
    """Shard the parameters of a module along one mesh dimension and replicate them along the others, in place.

    Parameters become DTensors over the whole mesh, ``Shard`` along `shard_dim` and ``Replicate`` elsewhere, but for
    the dimensions along which they are split already. FSDP works along `shard_dim` alone; the gradient manager sums
    over the other data dimensions, in buckets and overlapped with the backward pass. Where `shard_dim` has size 1, the
    module is replicated and FSDP stays out of the way, with all of its options, unless layers of it are split: to compute
    with a part of a parameter that records all of its layout is what FSDP does, with one rank too.

    Args:
        module: Module to change; see `parallelize_fsdp`.
        mesh: Mesh of a domain, or a slice of it, that contains `shard_dim`, and the dimension along which layers of the
            module are split, if any.
        shard_dim: Name of the dimension to shard along.
        *fsdp_args: Further positional arguments of ``fully_shard``.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``.

    Raises:
        ValueError: If the mesh has no dimension `shard_dim`, or lacks one that layers are split along.
    """
    names = mesh.mesh_dim_names or ()
    if shard_dim not in names:
        raise ValueError(f"the mesh has the dimensions {names}, not {shard_dim!r}. Pass shard_dim as one of them.")
    if mesh.size(names.index(shard_dim)) == 1 and not _lacks_replicas(module, mesh):
        parallelize_replicate(module, mesh)
        return
    replicate_numbers(module, mesh, set(fsdp_kwargs.get("ignored_params") or ()))
    before = set(module.parameters())
    parallelize_fsdp(module, mesh[shard_dim] if mesh.ndim > 1 else mesh, *fsdp_args, **fsdp_kwargs)
    sharded = [parameter for parameter in module.parameters() if parameter not in before]
    if mesh.ndim > 1:
        layout_mesh = _with_shards_last(mesh, shard_dim) if any(map(_is_split, sharded)) else mesh
        for parameter in sharded:
            _record_layout(parameter, layout_mesh)


def _lacks_replicas(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Tell whether a split parameter does not record that it is replicated over a dimension of the mesh."""
    replicated = {name for dim, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(dim) > 1}
    with_leaves = replicated_parameters(module)
    return any(
        isinstance(parameter, DTensor)
        and parameter not in with_leaves
        and not replicated.issubset(parameter.device_mesh.mesh_dim_names or ())
        for parameter in module.parameters()
    )


def _is_split(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter was distributed before FSDP has sharded it."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1


def _with_shards_last(mesh: DeviceMesh, shard_dim: str) -> DeviceMesh:
    """Return the mesh with the same groups and the shard dimension last. See [Note: shards of split layers]."""
    names = mesh.mesh_dim_names or ()
    order = [*(name for name in names if name != shard_dim), shard_dim]
    return DeviceMesh.from_group(
        [mesh.get_group(name) for name in order],
        mesh.device_type,
        mesh.mesh.permute([names.index(name) for name in order]),
        mesh_dim_names=tuple(order),
    )


def _only_name(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("parallelize_fsdp needs a mesh whose dimension has a name where layers are split already")
    return names[0]


def _record_layout(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Let a parameter that FSDP has sharded record its layout on a larger mesh, replicated along the new dimensions.

    FSDP reads the layout back from the parameter when it starts, and gives it to the gradients. (torch 2.11 to 2.14:
    `FSDPParam.reset_sharded_param`.)

    Raises:
        ValueError: If the parameter is distributed along a dimension that the mesh lacks.
    """
    assert isinstance(parameter, DTensor)  # FSDP has just sharded it
    spec = parameter._spec
    known = dict(zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=False))
    names = mesh.mesh_dim_names or ()
    if lacking := [name for name in known if name not in names]:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is split along {', '.join(lacking)}, which the mesh of "
            f"parallelize_hsdp lacks ({', '.join(names)}). Pass a slice with both."
        )
    placements = tuple(_ordinary(known[name]) if name in known else Replicate() for name in names)
    parameter._spec = DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)


def _ordinary(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, _StridedShard) else placement
