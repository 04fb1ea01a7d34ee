"""Parts of a mapper of the whole module for the ranks of a pipeline, each of which has some of the tensors. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar, final

import torch
from typing_extensions import override

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperSelectGroups
from d9d.model_state.mapper.names import NearestNames, listed
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = ["part_to_export", "part_to_load"]

T = TypeVar("T")


def part_to_load(mapper: ModelStateMapper, own: Collection[str], whole: Collection[str]) -> ModelStateMapper:
    """Return what a rank needs of a mapper: the groups that make some of its tensors, and these tensors only.

    Args:
        mapper: Makes the tensors of the whole module.
        own: Names of the tensors of this rank.
        whole: Names of those of the whole module.

    Raises:
        ValueError: If the mapper makes tensors that the whole module does not have.
    """
    unknown = {name for group in mapper.state_dependency_groups() for name in group.outputs}.difference(whole)
    if unknown:
        raise ValueError(
            f"load_mapper makes tensors that the module does not have: {NearestNames(whole).described(unknown)}."
        )
    return _SomeOutputs(mapper, frozenset(own))


def part_to_export(
    mapper: ModelStateMapper, names_by_rank: Sequence[Collection[str]], rank: int, last_rank: int
) -> ModelStateMapper:
    """Return the groups of a mapper that a rank exports, so that each is exported by one rank of the pipeline.

    A group whose inputs several ranks have, as they are outside of the stages, is exported by the one with the last stage.

    Args:
        mapper: Reads the tensors of the whole module.
        names_by_rank: Names of the tensors that each pipeline rank has.
        rank: This rank in the pipeline.
        last_rank: The one with the last stage.

    Raises:
        ValueError: If a group needs tensors that no rank has, or that no rank has together.
    """
    order = [last_rank, *(other for other in range(len(names_by_rank)) if other != last_rank)]
    names = [frozenset(names) for names in names_by_rank]
    whole = frozenset[str]().union(*names)
    optional = mapper.optional_inputs()
    unknown: set[str] = set()
    torn: list[StateGroup] = []
    own: set[StateGroup] = set()
    for group in mapper.state_dependency_groups():
        needed = group.inputs - (optional - whole)
        owner = next((other for other in order if needed <= names[other]), None)
        if owner == rank:
            own.add(group)
        elif owner is None and needed <= whole:
            torn.append(group)
        elif owner is None:
            unknown |= needed - whole
    problems: list[str] = []
    if unknown:
        problems.append(f"it reads tensors that the module does not have: {NearestNames(whole).described(unknown)}.")
    if torn:
        problems.append(
            f"it puts tensors of several pipeline stages together, which no rank has: "
            f"{'; '.join(sorted(listed(group.inputs) for group in torn)[:3])}. Export them apart, or cut at another layer."
        )
    if problems:
        raise ValueError(f"export_mapper does not fit the module: {' '.join(problems)}")
    return ModelStateMapperSelectGroups(mapper, own.__contains__)


@final
class _SomeOutputs(ModelStateMapper):
    """A mapper for what is here: groups that make none of it are left out, and of the others the rest of what they make."""

    def __init__(self, mapper: ModelStateMapper, wanted: frozenset[str]) -> None:
        self._mapper = mapper
        self._wanted = wanted
        self._groups = frozenset(
            StateGroup(inputs=group.inputs, outputs=group.outputs & wanted)
            for group in mapper.state_dependency_groups()
            if group.outputs & wanted
        )
        self._optional = mapper.optional_inputs() & {name for group in self._groups for name in group.inputs}

    @override
    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return self._groups

    @override
    def optional_inputs(self) -> frozenset[str]:
        return self._optional

    @override
    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._chosen(self._mapper.apply(group))

    @override
    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        traced = self._mapper.trace(group)
        return None if traced is None else self._chosen(traced)

    def _chosen(self, produced: dict[str, T]) -> dict[str, T]:
        return {name: value for name, value in produced.items() if name in self._wanted}
