"""Optimizers of a module that is cut into pipeline stages: the whole one, of which each rank has a part.

[Note: indices of an optimizer]
A torch optimizer saves its state by the position of a parameter in its groups, and each rank counts its own parameters
only. In the file they are counted as in one process: by group, and in the order of ``named_parameters()`` of the whole
module. So groups must be filled in this order, as filters over ``named_parameters()`` do.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import local_tensor

__all__ = [
    "GroupNames",
    "StageCut",
    "check_group_counts",
    "check_optimizers",
    "merge_group_names",
    "named_groups",
    "optimizer_problems",
    "part_of_optimizer",
    "set_up_together",
    "whole_groups",
]

SET_UP_RULE = (
    "configure_optimizers() must build the same optimizers on all pipeline ranks, though each has only the parameters of its "
    "stages. Fill the groups by filters over named_parameters(), and keep those that stay empty"
)

GroupNames = tuple[tuple[str, ...], ...]
"""Names of the parameters of an optimizer, by group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """What is left to know of a whole LightningModule when other pipeline ranks have parts of it."""

    parameter_names: tuple[str, ...]
    """Of the whole module, in the order of ``named_parameters()``."""
    state_names: tuple[str, ...]
    """Keys of the state dict of the whole module, in order."""
    group: dist.ProcessGroup
    """The ranks that have the stages; not the group that stages exchange activations over."""
    last_rank: int = 0
    """Rank in the group with the last stage, where steps run to their end: what others have too is as it is there."""


class GroupPart(NamedTuple):
    """A group of an optimizer as one pipeline rank has it."""

    names: tuple[str, ...]
    """Its parameters."""
    options: dict[str, str]
    """Its hyperparameters, as text."""


class OptimizerPart(NamedTuple):
    """An optimizer as one pipeline rank has it."""

    kind: str
    """Its class."""
    groups: tuple[GroupPart, ...]
    """Its groups."""


def named_groups(module: nn.Module, optimizer: Optimizer) -> GroupNames:
    """Return the names of an optimizer's parameters in a module, by group. No communication.

    Raises:
        ValueError: If one is no parameter of the module.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[tuple[str, ...]] = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise ValueError(
                f"group {number} of the {type(optimizer).__name__} has parameters of shapes {unknown} that are not in "
                f"{type(module).__name__}, so they have no name in a checkpoint. Make them attributes of the module."
            )
        groups.append(tuple(names[id(parameter)] for parameter in group["params"]))
    return tuple(groups)


def merge_group_names(parts: Sequence[GroupNames], order: Sequence[str]) -> GroupNames:
    """Return the groups of the whole optimizer from those of the ranks.

    Args:
        parts: Groups of each rank, equally many.
        order: All names, in the order that counts.
    """
    position = {name: index for index, name in enumerate(order)}
    return tuple(
        tuple(sorted({name for part in groups for name in part}, key=lambda name: position[name]))
        for groups in zip(*parts, strict=True)
    )


def whole_groups(own: Sequence[GroupNames], cut: StageCut) -> list[GroupNames]:
    """Return the groups of the whole optimizers. All ranks of the pipeline must call it; it blocks the host.

    Args:
        own: Groups of this rank, of each optimizer; as `check_optimizers` wants them.
        cut: The whole module, and the ranks that have it.

    Raises:
        ValueError: On all ranks, if there are other numbers of groups on some.
    """
    parts = all_gather_object(list(own), cut.group)
    check_group_counts(parts)
    return [merge_group_names(by_rank, cut.parameter_names) for by_rank in zip(*parts, strict=True)]


def check_group_counts(parts: Sequence[Sequence[GroupNames]]) -> None:
    """Refuse optimizers whose numbers of groups differ between pipeline ranks. Pure.

    Args:
        parts: Groups of each optimizer, by rank.

    Raises:
        ValueError: If they do.
    """
    counts = [[len(groups) for groups in theirs] for theirs in parts]
    if any(theirs != counts[0] for theirs in counts):
        raise ValueError(
            f"the optimizers have {counts} groups by pipeline rank. Add groups in on_train_epoch_start, or on all ranks: "
            f"they may be empty."
        )


def set_up_together(setup: Callable[[], None], cut: StageCut | None) -> None:
    """Set optimizers up; if that fails on some pipeline ranks, it fails on all. All ranks must call it.

    A stage may lack what others have, so that ``configure_optimizers`` finds no parameters for a group there.

    Args:
        setup: Sets up those of this rank.
        cut: The whole module, if it is cut into pipeline stages.

    Raises:
        RuntimeError: If another rank has failed. A rank's own error is raised as it is.
    """
    if cut is None:
        setup()
        return
    failure = None
    try:
        setup()
    except Exception as error:  # noqa: BLE001  # raised below
        failure = error
    texts = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}", cut.group)
    if failure is not None:
        if "empty parameter list" in str(failure):
            failure.add_note(
                "This rank's stages have no parameter that the optimizer asks for, perhaps as they are frozen. Give it a "
                "group, which may be empty: AdamW([{'params': [...]}])."
            )
        raise failure
    problems = [f"pipeline rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if problems:
        raise RuntimeError(f"optimizers could not be set up on other ranks. {' '.join(problems)}")


def check_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], cut: StageCut | None, rule: str = SET_UP_RULE
) -> None:
    """Refuse optimizers that differ between the pipeline ranks. All ranks must call it.

    Args:
        module: Gives parameters their names.
        optimizers: Its optimizers.
        cut: The whole module, if it is cut into pipeline stages.
        rule: What makes them alike, for the message.

    Raises:
        ValueError: On all ranks, with all that is wrong.
    """
    if cut is None:
        return
    problem = None
    parts: list[OptimizerPart] = []
    try:
        parts = [_describe(module, optimizer) for optimizer in optimizers]
    except ValueError as error:
        problem = str(error)
    gathered = all_gather_object((parts, problem), cut.group)
    problems = [f"pipeline rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text is not None]
    problems = problems or optimizer_problems([theirs for theirs, _ in gathered], cut.parameter_names)
    if problems:
        raise ValueError(f"{rule}:\n" + "\n".join(f"- {text}" for text in problems))


def _describe(module: nn.Module, optimizer: Optimizer) -> OptimizerPart:
    groups = zip(named_groups(module, optimizer), optimizer.param_groups, strict=True)
    return OptimizerPart(
        kind=type(optimizer).__qualname__,
        groups=tuple(
            GroupPart(
                names=names,
                options={key: _text(value) for key, value in group.items() if key not in ("params", "param_names")},
            )
            for names, group in groups
        ),
    )


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return repr(local_tensor(value).tolist())
    # Others would show their address in memory, which differs between ranks.
    return repr(value) if isinstance(value, int | float | str | tuple | list | None) else type(value).__qualname__


def optimizer_problems(parts: Sequence[Sequence[OptimizerPart]], order: Sequence[str]) -> list[str]:
    """Say how the optimizers of the pipeline ranks do not fit together. Pure.

    Args:
        parts: The optimizers of each rank.
        order: Names of all parameters of the module, in order.
    """
    kinds = [[optimizer.kind for optimizer in optimizers] for optimizers in parts]
    if any(theirs != kinds[0] for theirs in kinds):
        return [f"optimizers by pipeline rank: {kinds}."]
    problems: list[str] = []
    for number, by_rank in enumerate(zip(*parts, strict=True)):
        counts = [len(optimizer.groups) for optimizer in by_rank]
        if len(set(counts)) > 1:
            problems.append(f"optimizer {number} has {counts} groups by pipeline rank.")
        else:
            problems += _group_problems(f"optimizer {number}", [optimizer.groups for optimizer in by_rank], order)
    return problems


def _group_problems(where: str, by_rank: Sequence[tuple[GroupPart, ...]], order: Sequence[str]) -> list[str]:
    position = {name: index for index, name in enumerate(order)}
    problems: list[str] = []
    group_of: dict[str, int] = {}
    for number, groups in enumerate(zip(*by_rank, strict=True)):
        for key in sorted({key for group in groups for key in group.options}):
            values = [group.options.get(key, "missing") for group in groups]
            if len(set(values)) > 1:
                problems.append(f"{where}, group {number}: {key} is {', '.join(values)} by pipeline rank.")
        for rank, group in enumerate(groups):
            places = [position[name] for name in group.names]
            if places != sorted(places):
                problems.append(
                    f"{where}, group {number}: parameters are not in the order of named_parameters() on pipeline rank "
                    f"{rank}: {', '.join(group.names)}."
                )
            problems += [
                f"{where}: {name} is in group {group_of[name]} and in group {number}."
                for name in group.names
                if group_of.setdefault(name, number) != number
            ]
    return list(dict.fromkeys(problems))


def part_of_optimizer(saved: Mapping[str, Any], own: GroupNames, whole: GroupNames, number: int = 0) -> dict[str, Any]:
    """Return the part of a whole optimizer's state dict that belongs to a rank, counted as the rank counts. Pure.

    Args:
        saved: State dict of the whole optimizer.
        own: Parameters of this rank, by group.
        whole: Parameters of all ranks, by group.
        number: Which optimizer it is, for messages.

    Raises:
        ValueError: If the file has other numbers of groups or parameters.
    """
    sizes, expected = [len(group["params"]) for group in saved["param_groups"]], [len(names) for names in whole]
    if sizes != expected:
        raise ValueError(
            f"optimizer {number} of the checkpoint has {sizes} parameters by group, but that of the module has {expected}. "
            f"Load it with the optimizers that it was saved with."
        )
    index_of = {
        name: index
        for names, group in zip(whole, saved["param_groups"], strict=True)
        for name, index in zip(names, group["params"], strict=True)
    }
    groups: list[dict[str, Any]] = []
    state: dict[Any, Any] = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    count = 0
    for names, group in zip(own, saved["param_groups"], strict=True):
        indices = list(range(count, count + len(names)))
        count += len(names)
        state |= {
            index: saved["state"][index_of[name]]
            for index, name in zip(indices, names, strict=True)
            if index_of[name] in saved["state"]
        }
        chosen = {**group, "params": indices}
        if "param_names" in group:
            by_index = dict(zip(group["params"], group["param_names"], strict=True))
            chosen["param_names"] = [by_index[index_of[name]] for name in names]
        groups.append(chosen)
    return {**saved, "state": state, "param_groups": groups}
