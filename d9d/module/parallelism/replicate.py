"""Replicate the parameters of a module: DTensors to the outside, plain tensors to the module's own code."""
# parameters are exchanged where torch keeps them, past the checks of nn.Module (torch 2.13)
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from d9d.core.compute_leaf import ParameterSlots, ReplicatedParameters
from d9d.core.placement import has_compute_leaf, local_tensor, set_compute_leaf


def parallelize_replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the parameters of a module over all dimensions of a mesh, in place.

    Parameters become DTensors with `Replicate` placements; those that are DTensors already stay as they are. The code
    of the module keeps computing with plain tensors: ``module.weight`` is a tensor of the full shape, while
    ``module.parameters()`` yields DTensors. Gradients are local until the gradient manager sums them.

    Values are not made equal: either all ranks initialise alike, or the caller broadcasts before. No communication.

    Args:
        module: Module to change; on the meta device or with values.
        mesh: Mesh of a domain, or a slice of it.
    """
    distribute_with_leaves(module, lambda parameter: _replicated(parameter, mesh))


def replicate_numbers(module: nn.Module, mesh: DeviceMesh, ignored: Collection[nn.Parameter]) -> None:
    """Replicate, as `parallelize_replicate` does, the parameters without a dimension to shard along, such as a temperature.

    Args:
        module: Module to change; on the meta device or with values.
        mesh: Mesh of a domain, or a slice of it.
        ignored: Parameters to leave alone.
    """

    def distribute(parameter: nn.Parameter) -> DTensor | None:
        return None if parameter.ndim or parameter in ignored else _replicated(parameter, mesh)

    distribute_with_leaves(module, distribute)


def _replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def distribute_with_leaves(module: nn.Module, distribute: Callable[[nn.Parameter], DTensor | None]) -> None:
    """Exchange the parameters of a module for DTensors with whose local tensors its code computes, in place.

    See [Note: compute leaf]. Parameters that are DTensors already stay as they are.

    Args:
        module: Module to change; on the meta device or with values.
        distribute: Returns what a parameter becomes, or None for one that stays as it is.
    """
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    slots: list[tuple[nn.Module, str]] = []
    for owner, name, parameter in _named_slots(module):
        if isinstance(parameter, DTensor):
            continue
        if parameter not in distributed:
            whole = distribute(parameter)
            if whole is None:
                continue
            distributed[parameter] = _with_leaf(parameter, whole)
        slots.append((owner, name))
        # Through setattr, since some modules keep lists of their parameters (nn.LSTM).
        setattr(owner, name, distributed[parameter])  # introspection: any name
    for owner in dict.fromkeys(owner for owner, _ in slots):
        owner._parameters = ParameterSlots(owner, {name for module, name in slots if module is owner})
    if slots:
        module.register_forward_pre_hook(ReplicatedParameters(slots))


def replicated_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module that it computes with through a plain leaf."""
    return {parameter for parameter in module.parameters() if has_compute_leaf(parameter)}


def _with_leaf(parameter: nn.Parameter, whole: DTensor) -> nn.Parameter:
    with torch.no_grad():
        distributed = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    leaf = nn.Parameter(local_tensor(distributed), requires_grad=parameter.requires_grad)
    set_compute_leaf(distributed, leaf)
    return distributed


def _named_slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield owner, name, parameter
