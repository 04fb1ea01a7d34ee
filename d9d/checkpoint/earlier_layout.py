"""Checkpoints in the layout before tensors had keys that no cut into stages changes, read as if they were in the present one.

Then each stage had a key of its place on its rank, ``pp_0_stage_1``, state of optimizers was numbered, and groups were taken
apart into one value for each option.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, cast

from d9d.checkpoint.contents import CheckpointContents

__all__ = ["in_present_layout"]

_MODEL = re.compile(r"tracked_modules\.(pp_[0-9]+_stage_[0-9]+)\.(.+)")
_STATE = re.compile(r"optimizer\.(pp_[0-9]+_stage_[0-9]+)\.state\.([0-9]+)\.(.+)")
_OPTION = re.compile(r"optimizer\.(pp_[0-9]+_stage_[0-9]+)\.param_groups\.([0-9]+)\.(.+)")
_OPTIMIZED = re.compile(r"optimized\.(pp_[0-9]+_stage_[0-9]+)")
_READ = ("optimizer.", "optimized.", "lr_scheduler.")
"""Beginnings of what becomes documents."""


def in_present_layout(contents: CheckpointContents) -> CheckpointContents:
    """Return contents with the names of the present layout, if they have earlier ones. Not collective; reads what is small."""
    if not any(_MODEL.fullmatch(name) for name in contents.names):
        return contents
    cut = next(name.removeprefix("cut.") for name in contents.names if name.startswith("cut."))
    stages = {
        f"pp_{rank}_stage_{index}": stage
        for rank, of_rank in enumerate(cut.split(" | "))
        for index, stage in enumerate(of_rank.split(" and "))
    }
    key_of = _keys(contents.names, stages)
    optimized: dict[str, list[str]] = {
        place[1]: cast("list[str]", contents.value(name))
        for name in contents.names
        if (place := _OPTIMIZED.fullmatch(name))
    }
    renamed: dict[str, str | None] = {}
    state_names: dict[str, list[str]] = {}
    for name in contents.names:
        if place := _MODEL.fullmatch(name):
            renamed[name] = f"model.{key_of[place[1], place[2]]}"
        elif place := _STATE.fullmatch(name):
            key = key_of[place[1], optimized[place[1]][int(place[2])]]
            state_names.setdefault(key, []).append(place[3])
            renamed[name] = f"optimizer.state.{key}.{place[3]}"
        elif name.startswith(_READ):
            renamed[name] = None
    documents: dict[str, Any] = {
        f"lr_scheduler.{stages[place]}": state for place, state in contents.documents("lr_scheduler").items()
    }
    for place, groups in _groups(contents).items():
        members = [key_of[place, name] for name in optimized[place]]
        described = [
            {
                "parameters": {members[number]: state_names.get(members[number], []) for number in group["params"]},
                "options": {name: value for name, value in group.items() if name != "params"},
            }
            for _, group in sorted(groups.items())
        ]
        documents[f"optimizer.stages.{stages[place]}"] = {"kind": None, "groups": described, "others": {}}
    return contents.with_names(renamed, documents)


def _keys(names: Collection[str], stages: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return the keys of all tensors by place and name: names, with the stage where several stages have one."""
    found = [(place[1], place[2]) for name in names if (place := _MODEL.fullmatch(name))]
    num_stages = Counter(name for _, name in found)
    return {(place, name): name if num_stages[name] == 1 else f"stage {stages[place]}: {name}" for place, name in found}


def _groups(contents: CheckpointContents) -> dict[str, dict[int, dict[str, Any]]]:
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for name in contents.names:
        if place := _OPTION.fullmatch(name):
            is_tensor = contents.entry(name) is not None
            value = contents.tensors([name])[0] if is_tensor else contents.value(name)
            groups.setdefault(place[1], {}).setdefault(int(place[2]), {})[place[3]] = value
    return groups
