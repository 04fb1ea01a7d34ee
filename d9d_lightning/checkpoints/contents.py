"""What a dump of Lightning holds, in the form in which it is saved: tensors by name, and one document of all else.

[Note: names in checkpoints]
Lightning dumps a state dict of the module, states of optimizers by the position of a parameter in its groups, and whatever
loops, callbacks and hooks have to say. In the files tensors have the names of the whole module, ``state_dict.<name>`` and
``optimizer_states.<number>.<name>.<key>``, which are the same on every mesh and however a pipeline cuts the module.
Everything that is no such tensor is in a `Document`.

Each pipeline rank has the parameters of its own stages, and those outside the pipelined submodule. What several of them have
is taken from the one with the last stage.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.checkpoint import Document
from d9d.core.dist_ops import all_gather_object
from d9d_lightning.checkpoints.restore import NAMES_KEY, TRAINABLE_KEY
from d9d_lightning.checkpoints.saved_tensors import SavedFiles, SavedTensors
from d9d_lightning.checkpoints.stage_optimizers import GroupNames, StageCut, check_group_counts, merge_group_names

__all__ = ["Checkpoint", "checkpoint_from", "state_to_save"]

Checkpoint = dict[str, Any]
"""Whatever Lightning, its callbacks and the user's hooks put there."""

_STATE, _OPTIMIZERS, _DOCUMENT = "state_dict", "optimizer_states", "rest"


class _Place(NamedTuple):
    """Where a value stands in a checkpoint, by the names of the whole module."""

    entry: str
    """Key of the checkpoint."""
    optimizer: int | None
    """Which optimizer it belongs to; None in the state dict of a module."""
    name: str
    """Name of the parameter, or key of the state dict."""
    key: str
    """Key of the value in an optimizer's state of a parameter."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What a pipeline rank tells the others of its checkpoint."""

    places: dict[_Place, Any]
    """Values that are no tensors; None in place of tensors."""
    tensors: frozenset[_Place]
    """Those with tensors."""
    others: frozenset[str]
    """Entries of the checkpoint that are no state dicts of the module. An empty mapping may be the state of no tensor."""
    groups: tuple[GroupNames, ...]
    """Groups of each of its optimizers."""
    versions: dict[str, dict[str, Any]]
    """Versions of the modules, as torch keeps them beside a state dict, by entry."""
    trainable: frozenset[str]
    """Parameters that are not frozen."""


def state_to_save(
    checkpoint: Checkpoint,
    module: nn.Module,
    groups: Sequence[GroupNames],
    cut: StageCut | None,
    *,
    is_of_first_replica: bool,
) -> dict[str, Any]:
    """Return what this rank saves of a checkpoint. All ranks of a pipeline must call it; it blocks the host.

    Every entry whose keys are names of the state dict is taken for a state dict of the module, as callbacks keep averages.

    Args:
        checkpoint: What Lightning has dumped on this rank.
        module: The module, or the part of it that this rank has.
        groups: As of `named_groups`, of each optimizer in ``checkpoint["optimizer_states"]``.
        cut: The whole module, if it is cut into pipeline stages.
        is_of_first_replica: Whether plain values that may differ between replicas, such as buffers, are saved from here.

    Raises:
        ValueError: On all ranks of the pipeline, if the optimizers have other numbers of groups on some.
    """
    known = cut.state_names if cut is not None else tuple(module.state_dict())
    values, others = _named_values(checkpoint, groups, frozenset(known))
    part = _Part(
        places={place: None if isinstance(value, torch.Tensor) else value for place, value in values.items()},
        tensors=frozenset(place for place, value in values.items() if isinstance(value, torch.Tensor)),
        others=frozenset(others),
        groups=tuple(groups),
        versions=_versions_of(checkpoint),
        trainable=frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad),
    )
    parts, own = ([part], 0) if cut is None else (all_gather_object(part, cut.group), cut.group.rank())
    check_group_counts([of_rank.groups for of_rank in parts])
    owners = _owners(parts, known, last_rank=0 if cut is None else cut.last_rank)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state: dict[str, Any] = {}
    for place, owner in owners.items():
        if owner != own or place not in part.tensors:
            continue
        value = values[place]
        # Replicas agree on parameters and their optimizers, and share the work; other plain tensors may differ.
        if isinstance(value, DTensor) or place.name in parameters or is_of_first_replica:
            _set_at(state, _path_of(place), value)
    if own == 0:
        order = cut.parameter_names if cut is not None else tuple(name for name, _ in module.named_parameters())
        state[_DOCUMENT] = Document(_document(checkpoint, parts, owners, order))
    return state


def _named_values(
    checkpoint: Checkpoint, groups: Sequence[GroupNames], known: frozenset[str]
) -> tuple[dict[_Place, Any], set[str]]:
    values: dict[_Place, Any] = {}
    others: set[str] = set()
    for entry, content in checkpoint.items():
        is_state = isinstance(content, Mapping) and bool(content) and known.issuperset(content)
        if entry == _STATE or (is_state and entry not in (_OPTIMIZERS, _DOCUMENT)):
            values |= {_Place(entry, None, name, ""): value for name, value in content.items()}
        elif entry != _OPTIMIZERS and not (isinstance(content, Mapping) and not content):
            others.add(entry)
    for number, (state, of_optimizer) in enumerate(zip(checkpoint.get(_OPTIMIZERS, ()), groups, strict=True)):
        names = [name for group in of_optimizer for name in group]
        for index, of_parameter in state["state"].items():
            if isinstance(index, int):
                values |= {_Place(_OPTIMIZERS, number, names[index], key): value for key, value in of_parameter.items()}
    return values, others


def _versions_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    return {
        entry: {path: dict(data) for path, data in vars(content)["_metadata"].items()}
        for entry, content in checkpoint.items()
        if isinstance(content, OrderedDict) and "_metadata" in vars(content)
    }


def _owners(parts: Sequence[_Part], known: Sequence[str], *, last_rank: int) -> dict[_Place, int]:
    """Return the rank that a value is taken from, for each, in the order of the whole module."""
    refused = {entry for part in parts for entry in part.others}
    owners: dict[_Place, int] = {}
    for rank, part in enumerate(parts):
        for place in part.places:
            if place.entry not in refused and (place not in owners or rank == last_rank):
                owners[place] = rank
    position = {name: index for index, name in enumerate(known)}
    entries = {entry: index for index, entry in enumerate(dict.fromkeys(place.entry for place in owners))}

    def order(place: _Place) -> tuple[int, int, int]:
        return entries[place.entry], place.optimizer or 0, position.get(place.name, len(position))

    return {place: owners[place] for place in sorted(owners, key=order)}


def _path_of(place: _Place) -> tuple[str, ...]:
    if place.optimizer is None:
        return place.entry, place.name
    return place.entry, str(place.optimizer), place.name, place.key


def _set_at(state: dict[str, Any], path: tuple[str, ...], value: torch.Tensor) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _document(
    checkpoint: Checkpoint, parts: Sequence[_Part], owners: Mapping[_Place, int], order: Sequence[str]
) -> dict[str, Any]:
    """Return all that is no tensor of the module or its optimizers, and where these belong."""
    module_states: dict[str, dict[str, Any]] = {}
    states: dict[int, dict[str, dict[str, list[Any]]]] = {}
    for place, owner in owners.items():
        is_tensor = place in parts[owner].tensors
        # A list: empty for a tensor, which is found by its name.
        held = [] if is_tensor else [parts[owner].places[place]]
        if place.optimizer is None:
            module_states.setdefault(place.entry, {})[place.name] = held
        else:
            states.setdefault(place.optimizer, {}).setdefault(place.name, {})[place.key] = held
    if _STATE in checkpoint:
        module_states.setdefault(_STATE, {})
    return {
        "entries": list(checkpoint),
        "others": {
            entry: content
            for entry, content in checkpoint.items()
            if entry not in module_states and entry != _OPTIMIZERS
        },
        "module_states": module_states,
        "versions": {entry: _merged_versions(entry, parts) for entry in module_states if entry in parts[0].versions},
        "optimizers": [
            _described_optimizer(saved, states.get(number, {}), [part.groups[number] for part in parts], order)
            for number, saved in enumerate(checkpoint.get(_OPTIMIZERS, ()))
        ],
        "trainable": [name for name in order if any(name in part.trainable for part in parts)],
    }


def _described_optimizer(
    saved: Mapping[str, Any], state: dict[str, Any], parts: Sequence[GroupNames], order: Sequence[str]
) -> dict[str, Any]:
    names_by_group = parts[0] if len(parts) == 1 else merge_group_names(parts, order)
    groups: list[dict[str, Any]] = []
    for names, group in zip(names_by_group, saved["param_groups"], strict=True):
        described = {**group, "params": list(names)}
        if "param_names" in group:
            # A rank knows the names of its own parameters only.
            described["param_names"] = list(names)
        groups.append(described)
    unnamed = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    more = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {"param_groups": groups, "state": state, "unnamed": unnamed, "more": more}


def _merged_versions(entry: str, parts: Sequence[_Part]) -> dict[str, Any]:
    """Take the version of a submodule from the first rank that has state of it: others have a placeholder there."""
    merged: dict[str, Any] = {}
    for part in parts:
        hosted = {prefix for place in part.places if place.entry == entry for prefix in _prefixes(place.name)}
        versions = part.versions.get(entry, {})
        merged |= {path: data for path, data in versions.items() if path not in merged or path in hosted}
    return merged


def _prefixes(name: str) -> Iterable[str]:
    words = name.split(".")
    return (".".join(words[:count]) for count in range(len(words)))


def checkpoint_from(files: SavedFiles) -> Checkpoint:
    """Return a checkpoint as Lightning has dumped it, with states whose tensors stay in the files until they are needed.

    States of optimizers have the names of their parameters too, under `NAMES_KEY`, and those that are not frozen are under
    `TRAINABLE_KEY`; files of earlier versions do not say it.

    Raises:
        ValueError: If the files hold something else.
    """
    document = files.read_document(_DOCUMENT)
    try:
        checkpoint = {entry: _content(entry, document, files) for entry in document["entries"]}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{files.path} is a checkpoint, but not one of D9DStrategy: {error!r}") from error
    if _OPTIMIZERS in checkpoint and "trainable" in document:
        checkpoint[TRAINABLE_KEY] = tuple(document["trainable"])
    return checkpoint


def _content(entry: str, document: Mapping[str, Any], files: SavedFiles) -> Any:  # noqa: ANN401  # whatever was dumped
    if entry == _OPTIMIZERS:
        return [_optimizer_state(number, saved, files) for number, saved in enumerate(document["optimizers"])]
    if entry in document["module_states"]:
        versions = document["versions"].get(entry)
        return SavedTensors(files, (entry,), document["module_states"][entry], versions)
    return document["others"][entry]


def _optimizer_state(number: int, saved: Mapping[str, Any], files: SavedFiles) -> dict[str, Any]:
    names_by_group = [tuple(group["params"]) for group in saved["param_groups"]]
    index_of = {name: index for index, name in enumerate(name for names in names_by_group for name in names)}
    return {
        "state": {
            index_of[name]: SavedTensors(files, (_OPTIMIZERS, str(number), name), held)
            for name, held in saved["state"].items()
        }
        | saved["unnamed"],
        "param_groups": [
            {**group, "params": [index_of[name] for name in group["params"]]} for group in saved["param_groups"]
        ],
        **saved["more"],
        NAMES_KEY: tuple(names_by_group),
    }
