"""Tensor parallelism under Lightning: which layers are split, and what peers must have in common."""
# how modules hold their parameters
# pyright: reportPrivateUsage=false

import random
from collections.abc import Iterable

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d.core.device import random_state, set_random_state
from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.module.parallelism.api import parallelize_tensor
from d9d_lightning.placements.plan import Choice

_Places = list[tuple[nn.Module, str, str]]
"""Owner, attribute and dotted name of each place of one parameter."""


def split_layers(module: nn.Module, choices: Iterable[Choice], mesh: DeviceMesh) -> None:
    """Split layers over the tensor-parallel ranks, in place. No communication.

    Args:
        module: The LightningModule, with the same values on all ranks of the mesh or on the meta device.
        choices: The layers below it, and how each is split.
        mesh: The tensor-parallel mesh.

    Raises:
        ValueError: If layers that share a parameter are split differently.
    """
    by_layer = {id(choice.module): choice for choice in choices}
    if not by_layer:
        return
    shared = [places for places in _places_by_parameter(module) if len(places) > 1]
    for choice in by_layer.values():
        parallelize_tensor(choice.module, choice.style, mesh)
    for places in shared:
        _tie_again(places)


def _places_by_parameter(module: nn.Module) -> list[_Places]:
    places: dict[nn.Parameter, _Places] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, name, f"{prefix}.{name}" if prefix else name))
    return list(places.values())


def _tie_again(places: _Places) -> None:
    """Make one parameter again of what each of its layers has split by itself."""
    now = [parameter for owner, name, _ in places if (parameter := owner._parameters[name]) is not None]
    layouts = [parameter.placements if isinstance(parameter, DTensor) else None for parameter in now]
    if any(layout != layouts[0] for layout in layouts):
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


def share_random_state(context: DistributedContext) -> None:
    """Let tensor-parallel and pipeline peers go on with the random numbers of the first of them. All ranks must call it.

    They work on one batch, so they must read the same samples in the same order and augment them alike; tensor-parallel
    peers must also drop the same elements, while stages draw numbers of their own. This takes the generators of Python,
    NumPy and PyTorch, that of the device included. Without such peers it does nothing. It blocks the host.
    """
    mesh, device = context.mesh_for(DENSE_DOMAIN), context.current_device
    for dim in ("pp", "tp"):
        if mesh[dim].size() == 1:
            continue
        states = [(random.getstate(), np.random.get_state(), random_state(device))]
        dist.broadcast_object_list(states, group=mesh.get_group(dim), group_src=0)
        python_state, numpy_state, torch_states = states[0]
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_random_state(device, torch_states)
