"""Find the layers of a module, and where to cut between them: plain functions that change nothing."""
# how modules hold their parameters
# pyright: reportPrivateUsage=false

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import nn

from d9d.core.module_names import matches, nearest

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open range of layers of each stage."""

_WILDCARDS = frozenset("*?[")


def is_plain_sequential(module: nn.Module) -> bool:
    """Tell whether a module calls its children one after another, and does nothing else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
    )


def works_in_place(layer: nn.Module) -> bool:
    """Tell whether a layer may change its input, as torch's activations and dropouts with ``inplace=True`` do."""
    return any(vars(child).get("inplace") is True for child in layer.modules())


def find_layers(pipelined: nn.Module, patterns: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the names of a module's layers in calling order, and what is wrong with the patterns."""
    if patterns is None:
        if is_plain_sequential(pipelined):
            return list(pipelined._modules), []
        return [], [_how_to_name_layers(pipelined)]
    # A module under two names comes twice, and `named_modules` would leave out the second one.
    all_names = [name for name, _ in pipelined.named_modules(remove_duplicate=False) if name]
    names: list[str] = []
    by_wildcard: set[str] = set()
    problems: list[str] = []
    for pattern in patterns:
        found = [name for name in all_names if matches(name, pattern)]
        if not found:
            problems.append(f"layers: {pattern!r} matches no submodule{nearest(pattern, all_names)}")
        again = [name for name in found if name in names]
        if _WILDCARDS & set(pattern):
            by_wildcard.update(found)
        # A layer that is called twice is named twice, but with a wildcard it is more likely a mistake.
        if not by_wildcard.isdisjoint(again):
            problems.append(f"layers: {pattern!r} matches {again[0]!r}, which an earlier pattern has named")
        names += found
    return names, problems + _nested_layers(names)


def _how_to_name_layers(pipelined: nn.Module) -> str:
    example = ", ".join(f'"{name}"' for name in _likely_layers(pipelined, ""))
    return (
        f"{type(pipelined).__name__} is no plain nn.Sequential, so it is not known what its forward() calls. If that is "
        f"x = layer(x), one layer after another, name the layers in calling order, such as "
        f"PipelineStages(layers=[{example}]). Else write it in this form"
    )


def _likely_layers(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if _is_stack(child):
            yield f"{prefix}{name}.*"
        elif any(_is_stack(inner) for inner in child.modules()):
            yield from _likely_layers(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _nested_layers(names: Sequence[str]) -> list[str]:
    known = set(names)
    problems: list[str] = []
    for name in dict.fromkeys(names):
        parents = [name[:index] for index, letter in enumerate(name) if letter == "."]
        problems += [f"layers: {name!r} is inside of the layer {parent!r}" for parent in parents if parent in known]
    return problems


# Balance


def balanced_ranges(costs: Sequence[float], num_stages: int, is_enough: Sequence[bool]) -> Ranges | None:
    """Cut layers into contiguous stages whose largest cost is as small as possible.

    Among such cuts, the one with the smallest sum of squared costs is taken, and among these the one with the larger
    stages first.

    Args:
        costs: Cost of each layer, not negative.
        num_stages: Number of stages.
        is_enough: For each layer, whether it alone may be a stage. A stage must have such a layer.

    Returns:
        The ranges; None if there is no such cut.
    """
    exact = _as_integers(costs)
    limit = _best_cut(exact, num_stages, is_enough, None)
    if limit is None:
        return None
    best = _best_cut(exact, num_stages, is_enough, limit[0])
    assert best is not None  # the limit comes from a cut
    ends = best[1]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Scale to integers, whose sums are exact, so that equal stages compare equal."""
    if all(isinstance(cost, int) for cost in costs):
        return [int(cost) for cost in costs]
    exponent = 50 - math.frexp(max(costs))[1]
    return [round(math.ldexp(cost, exponent)) for cost in costs]


_Cut: TypeAlias = tuple[int, tuple[int, ...]]
"""What a cut of some layers costs, and the ends of its stages."""


def _best_cut(costs: Sequence[int], num_stages: int, is_enough: Sequence[bool], limit: int | None) -> _Cut | None:
    """Find the best cut by dynamic programming from the last stage to the first; None if there is none.

    Without a limit the largest cost of a stage is minimised, with one the sum of squares of costs up to it.
    """
    # Best cuts of the layers from each one on; of no stages at all from behind the last layer.
    later: list[_Cut | None] = [*([None] * len(costs)), (0, ())]
    for _ in range(num_stages):
        starts = range(len(costs))
        later = [*(_best_from(start, costs, is_enough, limit, later) for start in starts), None]
    return later[0]


def _best_from(
    start: int, costs: Sequence[int], is_enough: Sequence[bool], limit: int | None, later: Sequence[_Cut | None]
) -> _Cut | None:
    """Choose the end of a stage that begins at a layer, given the best cuts of what comes after it."""
    best: _Cut | None = None
    cost, enough = 0, False
    for end in range(start + 1, len(costs) + 1):
        cost, enough = cost + costs[end - 1], enough or is_enough[end - 1]
        if limit is not None and cost > limit:
            break
        rest = later[end]
        if not enough or rest is None:
            continue
        total = max(cost, rest[0]) if limit is None else cost * cost + rest[0]
        # Later ends win ties: the earlier stage is the larger one.
        if best is None or total <= best[0]:
            best = (total, (end, *rest[1]))
    return best


# What a cut would break


def stages_by_layer(names: Sequence[str], ranges: Ranges) -> dict[str, set[int]]:
    """Return the stages of each layer; one that is called twice may be in two."""
    stages: dict[str, set[int]] = {}
    for stage, (start, end) in enumerate(ranges):
        for name in names[start:end]:
            stages.setdefault(name, set()).add(stage)
    return stages


def slots(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each place of each parameter and buffer, so that a shared one comes several times."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def layer_of(name: str, layers: dict[str, set[int]]) -> str | None:
    """Return the layer that a dotted name is in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in layers), None)


def uncalled_problems(pipelined: nn.Module, layers: dict[str, set[int]]) -> list[str]:
    """Name the parameters and buffers that no layer has, so that nothing would use them."""
    left = [name for name, _ in slots(pipelined) if layer_of(name, layers) is None]
    if not left:
        return []
    listed = ", ".join(map(repr, left[:5])) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
    return [
        (
            f"{listed} of {type(pipelined).__name__} would be used by nobody: stages call the layers alone, not its "
            f"forward(). Name the submodules that have them in layers=, or move them into a layer or out of the pipelined "
            f"module"
        )
    ]


def uncalled_modules(pipelined: nn.Module, layers: dict[str, set[int]]) -> list[str]:
    """Return the submodules without parameters and buffers that no layer has, such as a forgotten dropout."""
    names = [name for name, _ in pipelined.named_modules(remove_duplicate=False) if name]
    parents = {layer[:index] for layer in layers for index, letter in enumerate(layer) if letter == "."}
    return [
        name
        for name in names
        if layer_of(name, layers) is None
        and name not in parents
        and not any(other.startswith(f"{name}.") for other in names)
        and next(slots(pipelined.get_submodule(name)), None) is None
    ]


def tied_problems(pipelined: nn.Module, root: nn.Module | None, layers: dict[str, set[int]]) -> list[str]:
    """Find tensors that a cut would tear apart: those that two stages have, or a stage and something outside.

    Args:
        pipelined: The module that is cut.
        root: What it belongs to; None for nothing.
        layers: See `stages_by_layer`.
    """
    places: dict[int, list[tuple[str, set[int]]]] = {}
    for name, tensor in slots(pipelined):
        layer = layer_of(name, layers)
        if layer is not None:
            places.setdefault(id(tensor), []).append((name, layers[layer]))
    prefix = ""
    if root is not None and root is not pipelined:
        own = [f"{name}." for name, child in root.named_modules(remove_duplicate=False) if child is pipelined]
        prefix = own[0] if own else ""
        for name, tensor in slots(root):
            if id(tensor) in places and not name.startswith(tuple(own)):
                places[id(tensor)].append((name, set()))
    problems: list[str] = []
    for found in places.values():
        problems += _torn_apart(found, prefix)
    return list(dict.fromkeys(problems))


def _torn_apart(found: list[tuple[str, set[int]]], prefix: str) -> list[str]:
    first_name, first_stages = found[0]
    if len(first_stages) > 1:
        return [
            (
                f"{prefix}{first_name} is in the stages {', '.join(map(str, sorted(first_stages)))}, as its layer is called "
                f"several times: choose boundaries= that keep these calls in one stage"
            )
        ]
    for name, stages in found[1:]:
        if not stages:
            return [
                (
                    f"{prefix}{first_name} (stage {min(first_stages)}) and {name} (outside of the pipelined module) are one "
                    f"tensor, which a cut would tear apart: untie them"
                )
            ]
        if stages != first_stages:
            return [
                (
                    f"{prefix}{first_name} (stage {min(first_stages)}) and {prefix}{name} (stage {min(stages)}) are one "
                    f"tensor, which a cut would tear apart: untie them, or choose boundaries= that keep both in one stage"
                )
            ]
    return []
