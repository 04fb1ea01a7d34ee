"""Parts of a mapper of the whole module for the ranks of a pipeline, each of which has some of the tensors. Pure."""

from collections.abc import Collection, Sequence

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperSelectGroups
from d9d.model_state.mapper.names import NearestNames, listed

__all__ = ["part_to_export", "part_to_load"]


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
    own = frozenset(own)
    return ModelStateMapperSelectGroups(mapper, lambda group: not group.outputs.isdisjoint(own), outputs=own)


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
