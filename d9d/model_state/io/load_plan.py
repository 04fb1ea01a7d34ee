"""Work out how a model is filled from a model state, and everything that would go wrong, before anything is written.

[Note: tied parameters]
One parameter may have several names in ``state_dict()``, and files have it under one of them or all. It is set once, from
the first of its names in order that the mapper produces. Groups for its other names may lack their inputs; if they do not, all
values must be equal, which is compared before anything is written. Tied are names of one parameter, and of parameters that are
the same view of the same memory; other views that overlap are refused.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.model_state.io.model_tensors import Kept, Target, find_targets
from d9d.model_state.io.planning import without_garbage_collection
from d9d.model_state.io.reader import Foreseen, ReadableGroup, foresee_group, missing_text, order_groups
from d9d.model_state.io.source import ModelStateSource
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, require_mapper, runnable_groups
from d9d.model_state.mapper.names import NearestNames, listed
from d9d.model_state.mapper.pieces import TensorPieces
from d9d.model_state.problems import raise_problems

__all__ = ["LoadPlan", "PlannedGroup", "check_output", "plan_load"]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group of the mapper, and what its outputs are for.

    Attributes:
        readable: The group and the inputs that are there.
        foreseen: What the outputs will be; where it is known, it fits.
        targets: What the outputs are for; those for nothing are left out.
        compared: Outputs that fill nothing, as another one fills the same target, and the name of that one.
    """

    readable: ReadableGroup
    foreseen: Foreseen
    targets: Mapping[str, Target]
    compared: Mapping[str, str]

    @property
    def filled(self) -> dict[str, Target]:
        """The targets that are set from this group, by the names of its outputs."""
        return {name: target for name, target in self.targets.items() if name not in self.compared}


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """All groups that set something, in the order of reading, and all targets, in the order of their names."""

    groups: Sequence[PlannedGroup]
    targets: Sequence[Target]


@without_garbage_collection()
def plan_load(source: ModelStateSource, mapper: ModelStateMapper, model: nn.Module, keep: Kept, what: str) -> LoadPlan:
    """Decide from which group each parameter and persistent buffer of a model is filled. Reads no tensors.

    Args:
        source: The model state.
        mapper: Translates from its layout to the model's.
        model: The model, on its device.
        keep: What stays as it is.
        what: The model state in messages.

    Raises:
        ValueError: With everything that does not fit.
    """
    require_mapper(mapper)
    problems: list[str] = []
    targets, kept = find_targets(model, keep, problems)
    producers = _check_outputs_against(targets, mapper.state_dependency_groups(), problems)
    _, missing = runnable_groups(mapper, source.tensors)
    available = {name for name, group in producers.items() if group not in missing and name not in kept}
    chosen = _choose(targets, kept, available, set(producers), keep.option, problems)
    _report_missing(missing, targets, kept, chosen, source, problems)
    wanted = frozenset(producers[name] for name in available)
    planned: list[PlannedGroup] = []
    for readable in order_groups(wanted, source.tensors):
        names = [name for name in sorted(readable.group.outputs) if name in available]
        try:
            foreseen = foresee_group(mapper, readable.group, {name: source.tensors[name] for name in readable.inputs})
        except ValueError as error:
            problems.append(str(error))
            continue
        for name in names:
            if name in foreseen.outputs:
                problems.extend(_misfit(name, foreseen.outputs[name], targets[name].tensor))
        compared = {name: chosen[targets[name]] for name in names if chosen[targets[name]] != name}
        planned.append(PlannedGroup(readable, foreseen, {name: targets[name] for name in names}, compared))
    raise_problems(what, problems)
    return LoadPlan(planned, sorted(chosen, key=lambda target: target.names))


def _check_outputs_against(
    targets: Mapping[str, Target], groups: Iterable[StateGroup], problems: list[str]
) -> dict[str, StateGroup]:
    """Return the group that produces each name of the model."""
    producers: dict[str, StateGroup] = {}
    twice: set[str] = set()
    unexpected: set[str] = set()
    for group in groups:
        for name in group.outputs:
            if name in producers:
                twice.add(name)
            if name in targets:
                producers[name] = group
            else:
                unexpected.add(name)
    if twice:
        problems.append(f"The mapper produces from several groups: {listed(twice)}.")
    if unexpected:
        problems.append(
            f"The mapper produces {len(unexpected)} tensors that the model does not have: "
            f"{NearestNames(targets).described(unexpected)}."
        )
    return producers


def _choose(
    targets: Mapping[str, Target],
    kept: Collection[str],
    available: Collection[str],
    produced: Collection[str],
    keep_option: str,
    problems: list[str],
) -> dict[Target, str]:
    """Return the name that each target is set from. See [Note: tied parameters]."""
    chosen: dict[Target, str] = {}
    unset: set[str] = set()
    for target in dict.fromkeys(targets.values()):
        names = [name for name in target.names if name in available]
        kept_names = [name for name in target.names if name in kept]
        if names:
            chosen[target] = names[0]
        # A group that lacks inputs is reported for what it lacks.
        elif not kept_names and not any(name in produced for name in target.names):
            unset.update(target.names)
        if names and kept_names:
            problems.append(
                f"{listed(kept_names)} is to stay as it is, but is the same parameter as {listed(names)}, which "
                f"the mapper produces. Let `{keep_option}` match all of these names, or none."
            )
    if unset:
        problems.append(
            f"{len(unset)} parameters or buffers of the model are not produced by the mapper: "
            f"{NearestNames(set(produced)).described(unset)}. Add mappers for them, or name them in `{keep_option}` if they shall "
            f"stay as they are."
        )
    return chosen


def _report_missing(
    missing: Mapping[StateGroup, Sequence[str]],
    targets: Mapping[str, Target],
    kept: Collection[str],
    chosen: Mapping[Target, str],
    source: ModelStateSource,
    problems: list[str],
) -> None:
    """Report the inputs that are missing, but not where all that they are for is kept or set from elsewhere."""
    lacking: set[str] = set()
    for group, names in missing.items():
        needed = [name for name in group.outputs if name in targets and name not in kept]
        if any(targets[name] not in chosen for name in needed):
            lacking.update(names)
    if lacking:
        problems.append(f"The model state lacks what the mapper reads: {missing_text(lacking, source.tensors)}")


def check_output(name: str, output: torch.Tensor, target: torch.Tensor) -> None:
    """Raise ValueError if an output does not fit its target."""
    raise_problems(f"The output {name!r} of the mapper", _misfit(name, output, target))


def _misfit(name: str, output: "TensorPieces | torch.Tensor", target: torch.Tensor) -> list[str]:
    problems: list[str] = []
    if tuple(output.shape) != tuple(target.shape):
        problems.append(
            f"{name!r} has the shape {tuple(output.shape)} in the model state, as mapped, and {tuple(target.shape)} in the "
            f"model."
        )
    if not _keeps_kind(output.dtype, target.dtype):
        problems.append(
            f"{name!r} is {output.dtype} in the model state and {target.dtype} in the model, which cannot hold all its "
            f"values. If that is meant, convert it with ModelStateMapperCast."
        )
    if isinstance(output, DTensor):
        layout = (target.device_mesh, target.placements) if isinstance(target, DTensor) else None
        if layout != (output.device_mesh, output.placements):
            found = f"{target.placements} over {target.device_mesh}" if isinstance(target, DTensor) else "plain"
            problems.append(
                f"{name!r} has the placements {output.placements} over {output.device_mesh} as the mapper distributes it, "
                f"but is {found} in the model. Leave the distribution to load_model_state."
            )
    return problems


def _keeps_kind(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether a conversion is one between floats of different width, or loses nothing."""
    if source == target:
        return True
    if source.is_complex or target.is_complex:
        return source.is_complex and target.is_complex and target.itemsize >= source.itemsize
    if source.is_floating_point or target.is_floating_point:
        # Numbers of 8 bits need scales, which a conversion does not find.
        return source.is_floating_point and target.is_floating_point and target.itemsize > 1
    if torch.bool in (source, target):
        return False
    held, range_ = torch.iinfo(target), torch.iinfo(source)
    return held.min <= range_.min and range_.max <= held.max
