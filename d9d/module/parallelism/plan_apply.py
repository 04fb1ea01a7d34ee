"""Distribute a module by a pattern plan: split its layers, shard or replicate what is left."""
# how modules hold their parameters
# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.protocol import HandsOnTokens
from d9d.module.parallelism.plan import ParallelPlan, ResolvedPlan, resolve_plan
from d9d.module.parallelism.plan_words import Choice, apply_context, apply_split
from d9d.module.parallelism.replicate import parallelize_replicate
from d9d.module.parallelism.shard import parallelize_hsdp

SHARD_DIM = "dp_cp_shard"
DATA_DIMS = ("dp_replicate", SHARD_DIM, "cp_replicate")
"""Dimensions of ranks with different data."""

_Places = list[tuple[nn.Module, str, str]]
"""Owner, attribute and dotted name of each place of one parameter."""


def parallelize_by_plan(
    module: nn.Module, context: DistributedContext, plan: ParallelPlan, *, resolved: ResolvedPlan | None = None
) -> None:
    """Distribute a module, or a stage of one, over all meshes of a job by a plan, in place. No communication.

    What the plan does not shard is replicated over the data-parallel ranks.

    Args:
        module: On the meta device, or with values that are equal on all ranks.
        context: Ranks of the job; on one rank nothing changes.
        plan: What goes where: patterns, or the default. See `ParallelPlan.read`.
        resolved: What `resolve_plan` has found in the whole model (on the meta device, say), for a stage that has only some
            of the layers, by their names in the whole model. None: what it finds in this one.

    Raises:
        ValueError: With all that is wrong with the plan.
    """
    if not context.is_distributed:
        return
    resolved = resolve_plan(module, plan, context.mesh_params) if resolved is None else resolved.of_stage(module)
    split_by_plan(module, resolved, context)
    for choice in resolved.contexts.values():
        apply_context(choice, context)
    shard_by_plan(module, context, plan, resolved)
    # Where nothing is sharded, split layers still have to record that they are replicated.
    has_shards = data_mesh(context)[SHARD_DIM].size() > 1
    distribute_rest = parallelize_replicate if has_shards else parallelize_hsdp
    distribute_rest(module, data_mesh(context))


def data_mesh(context: DistributedContext) -> DeviceMesh:
    """Return the mesh that layouts are recorded on: the data dimensions, and that of split layers where there are any."""
    dims = (*DATA_DIMS, "tp") if context.mesh_params.has_tensor_parallel else DATA_DIMS
    return context.mesh_for(DENSE_DOMAIN)[dims]


def split_by_plan(module: nn.Module, resolved: ResolvedPlan, context: DistributedContext) -> None:
    """Split the layers that a plan names over tensor- and expert-parallel ranks, in place. No communication.

    Args:
        module: The whole module or what is left of it after a cut, with the same values on all ranks or on the meta device.
            Layers of the plan that are not there are left alone.
        resolved: The plan.
        context: Ranks of the job.

    Raises:
        ValueError: If layers that share a parameter are split differently.
    """
    present = {id(child) for child in module.modules()}
    by_layer = {id(choice.module): choice for choice in resolved.splits.values() if id(choice.module) in present}
    if not by_layer:
        return
    shared = [places for places in _places_by_parameter(module) if len(places) > 1]
    for choice in by_layer.values():
        apply_split(choice, context, sequence_parallel=resolved.is_sequence_parallel)
    for places in shared:
        _tie_again(places)
    if resolved.is_sequence_parallel:
        for child in module.modules():
            if isinstance(child, HandsOnTokens):
                child.use_token_parts(context.mesh_params.tensor_parallel)


def _places_by_parameter(module: nn.Module) -> list[_Places]:
    places: dict[nn.Parameter, _Places] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, name, f"{prefix}.{name}" if prefix else name))
    return list(places.values())


def _tie_again(places: _Places) -> None:
    """Make one parameter again of what each of its layers has split by itself."""
    now = [owner._parameters.get(name) for owner, name, _ in places]
    layouts = [parameter.placements if isinstance(parameter, DTensor) else None for parameter in now]
    # A fused layer has no such parameter any more.
    if None in now or any(layout != layouts[0] for layout in layouts):
        shown = ", ".join(
            f"{name!r} ({'whole' if layout is None else layout[0]})"
            for (_, _, name), layout in zip(places, layouts, strict=True)
        )
        raise ValueError(
            f"parallelize: {shown} are one parameter, and must be split alike. Name all of their layers in the plan, "
            f"such as 'vocab' for an embedding with 'colwise_gather' for the linear layer that has its weight, or none."
        )
    for owner, name, _ in places:
        owner.register_parameter(name, now[0])


def shard_by_plan(root: nn.Module, context: DistributedContext, plan: ParallelPlan, resolved: ResolvedPlan) -> None:
    """Shard what a plan says of a root and of what is below it over the data-parallel ranks, in place. No communication.

    What the plan does not shard stays as it is.

    Args:
        root: A module that becomes the root of its FSDP units, after its layers were split.
        context: Ranks of the job.
        plan: Options of FSDP.
        resolved: The plan.
    """
    mesh = data_mesh(context)
    if mesh.size(DATA_DIMS.index(SHARD_DIM)) == 1:
        return
    if resolved.placements is None:
        # Numbers such as a temperature have no dimension to shard along, and stay replicated.
        ignored = {parameter for parameter in root.parameters() if parameter.ndim == 0}
        _shard_blocks(root, mesh, {**plan.fsdp_kwargs, "ignored_params": ignored}, resolved)
    else:
        _shard_chosen(root, mesh, resolved.placements, plan.fsdp_kwargs)


def _shard_blocks(root: nn.Module, mesh: DeviceMesh, fsdp_kwargs: Mapping[str, Any], resolved: ResolvedPlan) -> None:
    """Shard each repeated block, or each part of some size, and what is left as the root."""
    below = {child for child in root.modules() if child is not root}
    units = [block for block in resolved.units if block in below]
    for unit in _without_shared_parameters(root, units):
        if any(parameter.ndim for parameter in unit.parameters()):
            parallelize_hsdp(unit, mesh, SHARD_DIM, **fsdp_kwargs)
    _shard_root(root, mesh, fsdp_kwargs)


def _shard_root(module: nn.Module, mesh: DeviceMesh, fsdp_kwargs: Mapping[str, Any]) -> None:
    # The code of a step may use the root's parameters after `forward` has ended, so they stay gathered until the
    # backward pass, which needs them at once anyway.
    parallelize_hsdp(module, mesh, SHARD_DIM, **{**fsdp_kwargs, "reshard_after_forward": False})


def _without_shared_parameters(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Drop units that share a parameter with something outside: FSDP would cut the tie."""
    uses = Counter(parameter for _, parameter in _slots(module))
    return [
        unit
        for unit in units
        if all(uses[parameter] == count for parameter, count in Counter(p for _, p in _slots(unit)).items())
    ]


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield each place of each parameter, so that a shared one comes several times."""
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                yield owner, parameter


def _shard_chosen(
    root: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Choice], fsdp_kwargs: Mapping[str, Any]
) -> None:
    """Shard the submodules that a plan names, inner ones first. Of what contains a parameter the innermost name counts."""
    by_depth = [placements[name] for name in sorted(placements, key=lambda name: name.count(".") + bool(name))]
    innermost: dict[nn.Parameter, object] = {}
    for choice in by_depth:
        innermost.update(dict.fromkeys(choice.module.parameters(), choice.value))
    kept = {
        parameter
        for parameter in root.parameters()
        if innermost.get(parameter, "replicate") == "replicate" or parameter.ndim == 0
    }
    is_sharded = any(parameter not in kept for parameter in root.parameters())
    kwargs = {**fsdp_kwargs, "ignored_params": kept}
    below = set(root.modules())
    units = [choice.module for choice in reversed(by_depth) if choice.value != "replicate" and choice.module in below]
    for unit in dict.fromkeys(units):
        parallelize_hsdp(unit, mesh, SHARD_DIM, **kwargs)
    if is_sharded and root not in units:
        # FSDP wants one root above its units, which also lets them prefetch.
        _shard_root(root, mesh, kwargs)
