"""What we need of FSDP2 and it has no public name for, in torch 2.11 to 2.14."""
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a model, outer ones first."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def fsdp_parameters(unit: FSDPModule) -> list[FSDPParam]:
    """Return FSDP's records of the parameters that belong to a unit itself, not to units below it."""
    return [parameter for group in _param_groups(unit) for parameter in group.fsdp_params]


def gathered_parameter(parameter: FSDPParam) -> torch.Tensor | None:
    """Return the full parameter that FSDP computes with; None before it has gathered for the first time."""
    return vars(parameter).get("_unsharded_param")


def count_unused_as_zero(unit: FSDPModule) -> None:
    """Let a parameter without a gradient take part in the unit's sums with zeros.

    Otherwise ranks that use different parameters would exchange buffers of different sizes: a hang, or garbage.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # introspection: torch 2.13 and newer
        unit.set_reduce_scatter_unused_params(True)
        return
    for group in _param_groups(unit):
        _fill_before_reduce(group)


def accumulate_in_reduce_dtype(unit: FSDPModule) -> None:
    """Move what a backward pass has left in full parameters to where sums over passes have the dtype of reductions."""
    for parameter in fsdp_parameters(unit):
        if gathered_parameter(parameter) is not None:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def sum_gradients_now(units: Iterable[FSDPModule]) -> None:
    """Sum what has been accumulated in the units of some models, and free what is gathered, as a backward pass would.

    All ranks must call it for the same units.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        # Known since the first forward pass. The root also sums for the units below it that autograd has not reached.
        if state._is_root:
            state._root_post_backward_final_callback()


def show_shards(units: Iterable[FSDPModule]) -> None:
    """Free what units have gathered, so that their parameters are the shards again. No communication.

    Also where an exception has left them in the middle of a forward pass, in which ``unit.reshard()`` may do nothing.
    """
    for unit in units:
        for group in _param_groups(unit):
            group._to_sharded()


def keep_gathered(units: Iterable[FSDPModule]) -> Callable[[], None]:
    """Let units stay gathered behind forward passes without a backward pass, and return a function that ends that.

    ``set_reshard_after_forward(False)`` is not enough: a root is freed all the same where one of its forward methods calls
    another one, as a step calls ``forward`` (torch 2.13).
    """
    groups = [group for unit in units for group in _param_groups(unit)]
    for group in groups:
        vars(group)["reshard"] = _do_nothing

    def end() -> None:
        for group in groups:
            del vars(group)["reshard"]

    return end


def _do_nothing() -> None:
    pass


def _param_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    state = vars(unit._get_fsdp_state())
    groups = state["_fsdp_param_groups"] if "_fsdp_param_groups" in state else [state["_fsdp_param_group"]]
    return [group for group in groups if group is not None]


def _fill_before_reduce(group: FSDPParamGroup) -> None:
    post_backward = group.post_backward

    def fill_and_reduce(*unused: Any) -> None:  # what autograd hands on
        for parameter in group.fsdp_params if group.reduce_grads else ():
            gathered = gathered_parameter(parameter)
            if (
                gathered is not None
                and gathered.requires_grad
                and gathered.grad is None
                and parameter.unsharded_accumulated_grad is None
            ):
                gathered.grad = torch.zeros_like(gathered)
        post_backward(*unused)

    vars(group)["post_backward"] = fill_and_reduce
