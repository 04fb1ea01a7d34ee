"""Where the factors of an adapter are, if the weight of its layer is distributed.

[Note: adapters of split layers]
Tensor parallelism hangs hooks on a layer, which turn inputs into DTensors and DTensors into outputs. The adapter needs these
inputs too, and its outputs must be added before the layer's are gathered or summed. So the hooks move to the layer with the
adapter, and everything inside of it computes with DTensors: split by outputs, the second factor is split like the weight;
split by inputs, the first.
"""
# hooks change their module where torch keeps them (torch 2.13)
# pyright: reportPrivateUsage=false

from collections.abc import Collection, Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from d9d.core.placement import has_compute_leaf
from d9d.module.parallelism.replicate import distribute_with_leaves
from d9d.module.parallelism.tensor import align_gradients

__all__ = ["follow_layout", "follow_split", "hook_ids", "move_hooks", "own_weight"]


def own_weight(layer: nn.Module) -> nn.Parameter:
    """Return the weight of a layer as the parameter that it is, also where the layer computes with a plain leaf of it.

    Raises:
        NotImplementedError: If it has none of its own.
    """
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if weight is None:
        raise NotImplementedError(
            f"a {type(layer).__name__} whose weight is taken apart, as tensor parallelism does with fused layers, can have no "
            f"adapter. Use a layer for each thing that it computes."
        )
    return weight


def follow_layout(base: nn.Module, factors: Sequence[nn.Module], *, is_sharded: bool) -> None:
    """Distribute the factors of an adapter to where the weight of its layer is computed with, in place.

    All ranks of the weight's mesh must call it. They get the values of its first rank, unless these are on the meta device.

    Args:
        base: The layer: an `nn.Linear` or a `GroupedLinear`.
        factors: The factors: whole, and for an `nn.Linear` first the one that takes its inputs.
        is_sharded: Whether FSDP holds the weight.
    """
    weight = own_weight(base)
    if not isinstance(weight, DTensor):
        return
    mesh = weight.device_mesh
    if not is_sharded and not has_compute_leaf(weight):
        follow_split(base, factors, src_data_rank=0)
        return
    # Code computes with plain tensors. FSDP does not take parameters in afterwards, so that these are replicated.
    placements = [Replicate()] * mesh.ndim if is_sharded else weight.placements
    for factor in factors:
        distribute_with_leaves(factor, lambda parameter: distribute_tensor(parameter.detach(), mesh, placements))


def follow_split(base: nn.Module, factors: Sequence[nn.Module], *, src_data_rank: int | None) -> None:
    """Split the factors of an adapter as tensor parallelism has split its `nn.Linear`. See [Note: adapters of split layers].

    Args:
        base: The layer.
        factors: The factors, first the one that takes its inputs.
        src_data_rank: Rank of the mesh whose values all get; None if they have the same already.
    """
    weight = own_weight(base)
    assert isinstance(weight, DTensor)  # it has just been split
    by_inputs, by_outputs = Shard(1), Shard(0)
    for factor, shared in zip(factors, (by_inputs, by_outputs), strict=True):
        placements: list[Placement] = [shared if each == shared else Replicate() for each in weight.placements]
        for name, parameter in list(factor.named_parameters(recurse=False)):
            distributed = distribute_tensor(
                parameter.detach(), weight.device_mesh, placements, src_data_rank=src_data_rank
            )
            factor.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))
        align_gradients(factor.parameters())


def hook_ids(module: nn.Module) -> set[int]:
    """Return what tells the forward hooks of a module apart from those that it will have later."""
    return {*module._forward_pre_hooks, *module._forward_hooks}


def move_hooks(source: nn.Module, target: nn.Module, *, but: Collection[int] = ()) -> None:
    """Move forward hooks from one module to another, in their order.

    Args:
        source: Has them.
        target: Gets them.
        but: Those that stay, from `hook_ids`.
    """
    for kind in ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs", "hooks_always_called"):
        hooks, others = (vars(module)[f"_forward_{kind}"] for module in (source, target))
        for number in [number for number in hooks if number not in but]:
            others[number] = hooks.pop(number)
