"""The state of optimizers by the names of their parameters, so that it does not depend on who holds which of them.

[Note: options of parameters]
A torch optimizer numbers its parameters, and keeps options such as learning rates by group. Numbers and groups change with the
cut into pipeline stages, with frozen parameters, and with the order in which groups were filled. So a checkpoint holds state by
the key of a parameter, and tells which options each key had. A group that is loaded takes the options that all of its members
had; members with different ones cannot be in one group. Where the job asks for other options, those of the checkpoint win, and
the difference is told.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.checkpoint import Document
from d9d.core.placement import like_parameter, local_tensor

__all__ = [
    "OptimizerRecord",
    "SavedOptions",
    "describe_optimizer",
    "equal_values",
    "load_named_state",
    "named_state",
    "room_for_state",
    "state_problems",
]

_OF_PROCESS = frozenset(["params", "param_names", "foreach", "fused", "capturable", "differentiable"])
"""Entries of groups that are no settings of the training: how this process computes an update, and the parameters."""
_SAME_RATIO = 1e-6
"""Relative difference of two ratios of learning rates that come from one schedule."""

# `Any` in this module: optimizers keep what they choose.
OptimizerRecord = dict[str, Any]
"""What is saved of an optimizer beside the state of parameters: its ``kind``, its ``groups`` with the names of state by key under
``parameters`` and with ``options``, and what else its state dict holds under ``others``."""
NamedState = dict[str, dict[str, Any]]
"""State by key of the parameter, and by its own name: tensors and documents."""


class _Member(NamedTuple):
    position: int
    parameter: nn.Parameter
    key: str


def _groups_of(
    optimizer: Optimizer, keys: Mapping[nn.Parameter, str]
) -> Iterator[tuple[dict[str, Any], list[_Member]]]:
    """Yield the groups with their parameters, numbered as in a state dict.

    Raises:
        ValueError: If a parameter has no key.
    """
    count = 0
    for number, group in enumerate(optimizer.param_groups):
        members: list[_Member] = []
        for parameter in group["params"]:
            if parameter not in keys:
                raise ValueError(
                    f"group {number} of {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is "
                    f"not in the model, and so has no name in a checkpoint. Make it an attribute of the model."
                )
            members.append(_Member(count, parameter, keys[parameter]))
            count += 1
        yield group, members


def named_state(optimizer: Optimizer, keys: Mapping[nn.Parameter, str]) -> NamedState:
    """Return references to the state of an optimizer by key; parameters without state are left out.

    Args:
        optimizer: Of one stage.
        keys: Keys of its parameters.
    """
    state: Mapping[int, Mapping[str, Any]] = optimizer.state_dict()["state"]
    return {
        member.key: {
            name: value if isinstance(value, torch.Tensor) else Document(value)
            for name, value in state[member.position].items()
        }
        for _, members in _groups_of(optimizer, keys)
        for member in members
        if state.get(member.position)
    }


def describe_optimizer(optimizer: Optimizer, keys: Mapping[nn.Parameter, str]) -> OptimizerRecord:
    """Return which options the parameters of an optimizer have, which state there is of them, and what is state of no parameter."""
    state: Mapping[torch.Tensor, Mapping[str, Any]] = optimizer.state
    groups = [
        {
            "parameters": {member.key: list(state.get(member.parameter, ())) for member in members},
            "options": {name: value for name, value in group.items() if name not in _OF_PROCESS},
        }
        for group, members in _groups_of(optimizer, keys)
    ]
    others = {name: value for name, value in optimizer.state_dict().items() if name not in ("state", "param_groups")}
    return {"kind": type(optimizer).__qualname__, "groups": groups, "others": others}


@dataclasses.dataclass(frozen=True, slots=True)
class SavedOptions:
    """What a checkpoint tells of the optimizers of all stages."""

    state_names: Mapping[str, Sequence[str]]
    """Names of the state of each parameter that was optimized, by key."""
    options: Mapping[str, Mapping[str, Any]]
    """Options of its group, by key."""

    kinds: Mapping[str, str | None]
    """Class of its optimizer, by key; None if that was not saved."""

    @classmethod
    def of_optimizers(cls, records: Iterable[OptimizerRecord]) -> "SavedOptions":
        """Merge the records of all stages, as `describe_optimizer` returned them."""
        names: dict[str, list[str]] = {}
        options: dict[str, dict[str, Any]] = {}
        kinds: dict[str, str | None] = {}
        for record in records:
            for group in record["groups"]:
                for key, of_parameter in group["parameters"].items():
                    names.setdefault(key, of_parameter)
                    options.setdefault(key, group["options"])
                    kinds.setdefault(key, record["kind"])
        return cls(names, options, kinds)

    def schedule_ratio(self) -> float | None:
        """Return what the schedule has multiplied all learning rates by, if it is one number."""
        ratios = [
            float(of_group["lr"]) / float(of_group["initial_lr"])
            for of_group in self.options.values()
            if of_group.get("initial_lr") and "lr" in of_group
        ]
        is_one = bool(ratios) and all(math.isclose(ratio, ratios[0], rel_tol=_SAME_RATIO) for ratio in ratios)
        return ratios[0] if is_one else None


def room_for_state(
    optimizer: Optimizer,
    keys: Mapping[nn.Parameter, str],
    saved: SavedOptions,
    entry_of: Callable[[str, str], TensorStorageMetadata | None],
) -> NamedState:
    """Allocate room for the state that a checkpoint has of the parameters of an optimizer, laid out like these.

    Args:
        optimizer: Of one stage.
        keys: Keys of its parameters in the checkpoint.
        saved: What state there is.
        entry_of: Returns what the checkpoint says of a state, by key and name; None if it is no tensor.
    """
    return {
        member.key: {
            name: _room(name, member.parameter, entry_of(member.key, name)) for name in saved.state_names[member.key]
        }
        for _, members in _groups_of(optimizer, keys)
        for member in members
        if saved.state_names.get(member.key)
    }


def _room(name: str, parameter: nn.Parameter, entry: TensorStorageMetadata | None) -> torch.Tensor | Document:
    if entry is None:
        return Document(None)
    if entry.size != parameter.shape or name == "step":
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    local = local_tensor(parameter)
    return like_parameter(torch.empty(local.shape, dtype=entry.properties.dtype, device=local.device), parameter)


def state_problems(optimizer: Optimizer, keys: Mapping[nn.Parameter, str], saved: SavedOptions) -> list[str]:
    """Return why an optimizer cannot go on from what was saved: another class, or groups of parameters that had different options.

    Args:
        optimizer: Of one stage.
        keys: Keys of its parameters in the checkpoint.
        saved: Options of all parameters.
    """
    kind = type(optimizer).__qualname__
    problems: list[str] = []
    for number, (_, all_members) in enumerate(_groups_of(optimizer, keys)):
        members = [member.key for member in all_members if member.key in saved.options]
        for key in members:
            before = saved.kinds[key]
            if before is not None and before != kind:
                problems.append(f"the optimizer of {key} is {before} there, and {kind} in the job")
                break
        for key in members[1:]:
            one, other = saved.options[members[0]], saved.options[key]
            different = [name for name in {**one, **other} if not equal_values(one.get(name), other.get(name))]
            if different:
                name = different[0]
                problems.append(
                    f"group {number} of the optimizer holds {members[0]} and {key}, which have a {name} of {one.get(name)} and "
                    f"of {other.get(name)} there: put them into different groups, as before"
                )
                break
    return problems


def load_named_state(
    optimizer: Optimizer,
    keys: Mapping[nn.Parameter, str],
    state: NamedState,
    saved: SavedOptions,
    others: Mapping[str, Any],
) -> list[str]:
    """Restore an optimizer, of which `state_problems` has found nothing.

    Parameters without state in the checkpoint start with none. A group of which no parameter was optimized before keeps the
    options of the job; its learning rate is where the schedule has brought those of the others.

    Args:
        optimizer: Of one stage.
        keys: Keys of its parameters in the checkpoint.
        state: By key, with values in place of documents.
        saved: Options of all parameters.
        others: What its state dict holds beside state of parameters and groups.

    Returns:
        Where the checkpoint has other options than the job, in words.
    """
    groups: list[dict[str, Any]] = []
    indexed: dict[int, dict[str, Any]] = {}
    told: list[str] = []
    for number, (group, members) in enumerate(_groups_of(optimizer, keys)):
        chosen = next((saved.options[member.key] for member in members if member.key in saved.options), None)
        if chosen is None:
            chosen = _options_of_new_group(group, saved)
        else:
            told += _differences(number, group, chosen)
        groups.append({**group, **chosen, "params": [member.position for member in members]})
        indexed |= {member.position: dict(state[member.key]) for member in members if member.key in state}
    optimizer.load_state_dict({**others, "state": indexed, "param_groups": groups})
    _keep_dtypes(optimizer, keys, state)
    return told


def _options_of_new_group(group: Mapping[str, Any], saved: SavedOptions) -> dict[str, Any]:
    ratio = saved.schedule_ratio()
    if ratio is None or "initial_lr" not in group or isinstance(group["lr"], torch.Tensor):
        return {}
    return {"lr": group["initial_lr"] * ratio}


def _differences(number: int, group: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    # A schedule changes the learning rate, and leaves its start.
    names = [name for name in chosen if name in group and name != "lr"]
    return [
        f"{'lr' if name == 'initial_lr' else name} of group {number} of the optimizer: {chosen[name]} of the checkpoint wins "
        f"over {group[name]} of the job"
        for name in names
        if not equal_values(chosen[name], group[name])
    ]


def _keep_dtypes(optimizer: Optimizer, keys: Mapping[nn.Parameter, str], state: NamedState) -> None:
    """Undo that torch casts state to the dtype of the parameter, such as moments in higher precision."""
    for parameter, values in cast("Mapping[nn.Parameter, dict[str, Any]]", optimizer.state).items():
        for name, value in state.get(keys[parameter], {}).items():
            is_cast = isinstance(value, torch.Tensor) and name != "step" and values[name].dtype != value.dtype
            if is_cast:
                kept = value if isinstance(values[name], DTensor) else local_tensor(value)
                values[name] = kept.to(values[name].device)


def equal_values(one: object, other: object) -> bool:
    """Tell whether two values of states are the same; tensors by shape and elements."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(one.cpu().eq(other.cpu()).all())
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal_values, one, other))
    return one == other
