"""Choose the FSDP units of a model that nobody annotated.

A unit is gathered as a whole: too large wastes memory, too small wastes time (FSDP2 spends about half a millisecond of
Python per unit and step, whatever its size).
"""

from collections import Counter

from torch import nn


def wrap_by_size(module: nn.Module, min_params: int) -> list[nn.Module]:
    """Return the smallest submodules that hold at least `min_params` parameters each, innermost first.

    A parameter counts for the innermost chosen module above it; what is left over belongs to the root, which is not
    part of the result. Containers that have no forward pass of their own (`nn.ModuleList`, `nn.ModuleDict`) are never
    units.

    Args:
        module: Root of the model.
        min_params: Smallest number of parameters (elements, not tensors) that makes a unit.
    """
    units: list[nn.Module] = []

    def uncovered(child: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in child.parameters(recurse=False))
        total = own + sum(uncovered(grandchild) for grandchild in child.children())
        if child is not module and total >= min_params and _has_forward(child):
            units.append(child)
            return 0
        return total

    uncovered(module)
    return units


def repeated_blocks(module: nn.Module, min_repeats: int = 2) -> list[nn.Module]:
    """Return the blocks that a model stacks: the outermost modules of a class that occurs side by side in a container.

    These are the transformer layers, residual blocks and the like, which make good units: equal in size, and used one
    after the other. A stack is a `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` in which one class with
    children of its own occurs at least `min_repeats` times.

    Args:
        module: Root of the model.
        min_repeats: How often a class must occur in one container.
    """
    stacked = list(module.children()) if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) else []
    counts = Counter(type(child) for child in stacked if next(child.children(), None) is not None)
    blocks: list[nn.Module] = []
    for child in module.children():
        is_repeated = counts[type(child)] >= min_repeats
        blocks.extend([child] if is_repeated else repeated_blocks(child, min_repeats))
    return list(dict.fromkeys(blocks))


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
