"""Parameters and optimizers that all ranks must have in common, compared before any rank waits for another because of them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from d9d.core.agreement import agree_on
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants

__all__ = ["agree_on_module", "agree_on_optimizers"]


def agree_on_module(module: nn.Module, context: DistributedContext) -> None:
    """Compare the tensors of a module that is not cut into stages: names, shapes, types, order. All ranks must call it; blocks.

    Raises:
        ValueError: On all ranks, naming the tensors that differ.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    facts = {name: _form(tensor) for name, tensor in tensors}
    mend = f"Build the same {type(module).__name__} on all ranks: layers, and what of them trains, must not depend on the rank."
    participants = Participants(context.groups[:1])
    agree_on(participants, "the module", facts, mend)
    # Values are exchanged by position.
    mend = f"{type(module).__name__} must get its layers in one order: build them from a list or sorted names, not from a set."
    agree_on(participants, "the order of the module's tensors", {"order": list(facts)}, mend)


def _form(tensor: torch.Tensor) -> str:
    shape = "without a shape yet" if is_lazy(tensor) else tuple(tensor.shape)
    return f"{tensor.dtype} {shape}{', trained' if tensor.requires_grad else ''}"


def agree_on_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], context: DistributedContext, *, is_cut: bool
) -> None:
    """Compare optimizers: kinds, groups and their options. All ranks must call it; blocks.

    Args:
        module: Has the parameters.
        optimizers: As ``configure_optimizers()`` has built them on this rank.
        context: Ranks of the job.
        is_cut: Whether ranks have different stages of the module, and so parameters of other names.

    Raises:
        ValueError: On all ranks, naming what differs.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    facts: dict[str, object] = {"number of optimizers": len(optimizers)}
    for number, optimizer in enumerate(optimizers):
        described: dict[str, object] = {"kind": type(optimizer).__qualname__}
        for index, group in enumerate(optimizer.param_groups):
            options: dict[str, object] = {
                name: value
                for name, value in group.items()
                if isinstance(value, str | int | float | tuple | torch.Tensor | None)
            }
            if not is_cut:
                options["parameters"] = [names.get(id(parameter)) for parameter in group["params"]]
            described[f"groups.{index}"] = options
        facts[f"optimizers.{number}"] = described
    mend = "configure_optimizers() must not depend on the rank."
    agree_on(Participants(context.groups[:1]), "the optimizers", facts, mend)
