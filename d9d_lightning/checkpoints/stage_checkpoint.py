"""Checkpoints of a module that is cut into pipeline stages: one file, as a single process would have written it.

Each pipeline rank has the parameters of its own stages, under the names they have in the whole module, and those outside
the pipelined submodule, which are equal on all of them. What several ranks have is taken from the one with the last stage.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import is_sharded, local_tensor
from d9d_lightning.checkpoints.stage_optimizers import GroupNames, StageCut, merge_group_names

__all__ = ["full_tensor", "merge_stages"]


class _Tensor(NamedTuple):
    """A tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, where it is. All ranks that share a distributed one must call it."""
    if isinstance(tensor, DTensor) and is_sharded(tensor):
        return tensor.full_tensor().detach()
    return local_tensor(tensor).detach()


class _Place(NamedTuple):
    """Where a value stands in a checkpoint, by the names of the whole module."""

    entry: str
    """Key of the checkpoint."""
    optimizer: int | None
    """Which optimizer it belongs to; None in the state dict of a module."""
    name: str
    """Name of the parameter, or key of the state dict."""
    key: object
    """Key of the value in an optimizer's state of a parameter."""


class _Part(NamedTuple):
    """What a pipeline rank tells the others of its checkpoint."""

    places: dict[_Place, object]
    """Its values; tensors only by a `_Tensor`."""
    others: set[str]
    """Entries of the checkpoint that are no state dicts of the module."""
    groups: tuple[GroupNames, ...]
    """Groups of each of its optimizers."""
    metadata: dict[str, Any]
    """Versions of the modules, as torch keeps them beside a state dict."""


def merge_stages(
    checkpoint: Mapping[str, Any], optimizer_names: Sequence[GroupNames], cut: StageCut
) -> tuple[dict[str, Any], set[str]]:
    """Bring the state dicts of all stages together on rank 0. All ranks must call it; it blocks the host.

    One tensor at a time: rank 0 gets the whole module, and the others hold no more than the whole of one tensor. Every
    entry whose keys are names of the state dict is taken for a state dict of the module.

    Args:
        checkpoint: What Lightning has dumped on this rank.
        optimizer_names: As of `named_groups`, of each optimizer in ``checkpoint["optimizer_states"]``.
        cut: The whole module, and the ranks that have it.

    Returns:
        The merged entries with full tensors on the host, on rank 0 (elsewhere nothing), and the keys of these entries.

    Raises:
        RuntimeError: On all ranks of a pipeline, if one of them has values that cannot be sent.
    """
    values, others = _named_values(checkpoint, optimizer_names, cut)
    described = {place: _describe_value(value) for place, value in values.items()}
    part = _Part(described, others, tuple(optimizer_names), _metadata_of(checkpoint.get("state_dict")))
    parts = _exchange(part, cut.group)
    refused = {entry for other in parts for entry in other.others}
    is_of_first = dist.get_process_group_ranks(cut.group)[0] == 0
    merged: dict[_Place, Any] = {}
    for place, owner in _owners(parts, cut).items():
        if place.entry in refused:
            continue
        value = values.get(place)
        is_owner = cut.group.rank() == owner
        if is_owner and isinstance(value, torch.Tensor):
            # All ranks of the stage are the owners of their pipelines, and take part.
            value = full_tensor(value)
        if is_of_first:
            value = _hand_over(value, parts[owner].places[place], owner, cut.group)
        if is_of_first and cut.group.rank() == 0:
            merged[place] = value
    entries = {place.entry for other in parts for place in other.places} - refused
    if "optimizer_states" in checkpoint:
        entries.add("optimizer_states")
    if not (is_of_first and cut.group.rank() == 0):
        return {}, entries
    return _build_entries(checkpoint, merged, parts, cut), entries


def _named_values(
    checkpoint: Mapping[str, Any], optimizer_names: Sequence[GroupNames], cut: StageCut
) -> tuple[dict[_Place, Any], set[str]]:
    known = set(cut.state_names)
    values: dict[_Place, Any] = {}
    others: set[str] = set()
    for entry, content in checkpoint.items():
        if entry == "state_dict" or (isinstance(content, Mapping) and content and known.issuperset(content)):
            values |= {_Place(entry, None, name, None): value for name, value in content.items()}
        elif entry != "optimizer_states":
            others.add(entry)
    for number, (state, groups) in enumerate(zip(checkpoint.get("optimizer_states", ()), optimizer_names, strict=True)):
        names = [name for group in groups for name in group]
        for index, parameter_state in state["state"].items():
            if isinstance(index, int):
                values |= {
                    _Place("optimizer_states", number, names[index], key): value
                    for key, value in parameter_state.items()
                }
    return values, others


def _describe_value(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return _Tensor(tuple(value.shape), value.dtype, value.device.type)


def _metadata_of(state_dict: object) -> dict[str, Any]:
    return dict(vars(state_dict).get("_metadata", {})) if isinstance(state_dict, OrderedDict) else {}


def _exchange(part: _Part, group: dist.ProcessGroup) -> list[_Part]:
    try:
        gathered: list[_Part | str] = all_gather_object(part, group)
    except RuntimeError:
        # A broken connection.
        raise
    except Exception as error:  # noqa: BLE001  # whatever objects raise when they are pickled
        # Nothing has been sent yet: the others take this for the exchange.
        gathered = all_gather_object(f"{type(error).__name__}: {error}", group)
    failures = [f"pipeline rank {rank}: {text}" for rank, text in enumerate(gathered) if isinstance(text, str)]
    if failures:
        raise RuntimeError(
            f"the checkpoint has values beside tensors that cannot be sent to rank 0. Save what pickle takes. "
            f"{'; '.join(failures)}"
        )
    return [part for part in gathered if isinstance(part, _Part)]


def _owners(parts: Sequence[_Part], cut: StageCut) -> dict[_Place, int]:
    """Return the rank that a value is taken from, for each, in the order of the whole module."""
    owners: dict[_Place, int] = {}
    for rank, part in enumerate(parts):
        for place in part.places:
            if place not in owners or rank == cut.last_rank:
                owners[place] = rank
    positions = [{name: index for index, name in enumerate(names)} for names in (cut.state_names, cut.parameter_names)]
    entries = {entry: index for index, entry in enumerate(dict.fromkeys(place.entry for place in owners))}

    def position(place: _Place) -> tuple[int, int, int]:
        known = positions[place.optimizer is not None]
        return entries[place.entry], place.optimizer or 0, known.get(place.name, len(known))

    return {place: owners[place] for place in sorted(owners, key=position)}


def _hand_over(value: Any, described: object, owner: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401  # any state
    """Send a value to the first rank of a group, and return it there, on the host."""
    if not isinstance(described, _Tensor):
        return described
    if owner == 0:
        return value.cpu() if group.rank() == 0 else None
    # As bytes, which every backend can send, whatever the type.
    if group.rank() == owner:
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            dist.send(flat, group=group, group_dst=0)
    if group.rank() == 0:
        received = torch.empty(described.shape, dtype=described.dtype, device=described.device_type)
        if received.numel():
            dist.recv(received.reshape(-1).view(torch.uint8), group=group, group_src=owner)
        return received.cpu()
    return None


def _build_entries(
    checkpoint: Mapping[str, Any], values: Mapping[_Place, Any], parts: Sequence[_Part], cut: StageCut
) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    states: dict[int, dict[str, dict[object, Any]]] = {}
    for place, value in values.items():
        if place.optimizer is None:
            entries.setdefault(place.entry, OrderedDict())[place.name] = value
        else:
            states.setdefault(place.optimizer, {}).setdefault(place.name, {})[place.key] = value
    if "state_dict" in entries:
        vars(entries["state_dict"])["_metadata"] = _merge_metadata(parts)
    if "optimizer_states" in checkpoint:
        entries["optimizer_states"] = [
            _build_optimizer_state(
                saved,
                states.get(number, {}),
                [part.groups[number] for part in parts],
                cut,
            )
            for number, saved in enumerate(checkpoint["optimizer_states"])
        ]
    return entries


def _build_optimizer_state(
    saved: Mapping[str, Any], states: Mapping[str, Any], parts: Sequence[GroupNames], cut: StageCut
) -> dict[str, Any]:
    whole = merge_group_names(parts, cut.parameter_names)
    index_of = {name: index for index, name in enumerate(name for names in whole for name in names)}
    groups: list[dict[str, Any]] = []
    for names, group in zip(whole, saved["param_groups"], strict=True):
        merged = {**group, "params": [index_of[name] for name in names]}
        if "param_names" in group:
            # Rank 0 knows the names of its own parameters only.
            merged["param_names"] = list(names)
        groups.append(merged)
    unnamed = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    return {
        **saved,
        "state": {index_of[name]: state for name, state in states.items()} | unnamed,
        "param_groups": groups,
    }


def _merge_metadata(parts: Sequence[_Part]) -> OrderedDict[str, Any]:
    """Take the metadata of a submodule from the first rank that has state of it: others have a placeholder there."""
    merged: OrderedDict[str, Any] = OrderedDict()
    for part in parts:
        hosted = {prefix for place in part.places if place.entry == "state_dict" for prefix in _prefixes(place.name)}
        merged |= {path: data for path, data in part.metadata.items() if path not in merged or path in hosted}
    return merged


def _prefixes(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:count]) for count in range(len(words))]
