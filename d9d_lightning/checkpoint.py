"""Lightning checkpoints that do not depend on the mesh: plain files with full tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.core.placement import is_sharded, like_parameter, local_tensor, shard_of

Checkpoint = dict[str, Any]
"""Whatever Lightning, its callbacks and the user's hooks put there."""


@torch.no_grad()
def gather_checkpoint(checkpoint: Checkpoint, *, keep: bool) -> Checkpoint:
    """Return a checkpoint with each distributed tensor replaced by the full tensor on the host.

    One tensor at a time, in the order of the mapping. All ranks must call it with the same structure; it blocks the
    host.

    Args:
        checkpoint: What Lightning has dumped, with tensors as they are on this rank.
        keep: Whether this rank wants the result; others take part and get empty places.
    """
    return apply_to_collection(checkpoint, DTensor, _full_on_host, keep=keep)


def _full_on_host(tensor: DTensor, *, keep: bool) -> torch.Tensor | None:
    full = tensor.full_tensor() if is_sharded(tensor) else local_tensor(tensor)
    return full.detach().cpu() if keep else None


def error_of(save: Callable[[], None]) -> Exception | None:
    """Run what one rank does for all, and return the error that it must tell the others about instead of raising it."""
    try:
        save()
    except Exception as error:  # noqa: BLE001  # the caller raises it on all ranks
        return error
    return None


def shard_model_state(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state dict whose full tensors are cut to what this rank holds of a module. No communication.

    A tensor whose shape does not fit stays as it is, for ``load_state_dict`` to complain about.
    """
    targets = module.state_dict()
    return {name: _shard_like(tensor, targets.get(name)) for name, tensor in state_dict.items()}


def shard_optimizer_state(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict whose full tensors are cut to what this rank holds. No communication.

    Args:
        state_dict: As `torch.optim.Optimizer.state_dict` returns it, with full tensors.
        optimizer: Holds the parameters, in the order of the state dict.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, parameters, strict=False))
    state = {
        index: {
            # The step counter is a scalar, as a parameter may be.
            name: value if name == "step" else _shard_like(value, by_index.get(index))
            for name, value in values.items()
        }
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _shard_like(value: Any, target: torch.Tensor | None) -> Any:  # noqa: ANN401  # states hold anything
    if not isinstance(target, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != target.shape:
        return value
    return like_parameter(shard_of(value, target).to(local_tensor(target).device, copy=True), target)
