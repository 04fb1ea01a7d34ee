"""Finds what is wrong with a graph of mappers before it meets any tensor."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.names import NearestNames, capped, listed
from d9d.model_state.problems import raise_problems

__all__ = ["check_mapper", "check_outputs", "collisions", "declared_groups"]

_MAX_SHOWN = 3


def check_mapper(
    mapper: ModelStateMapper, *, sources: Collection[str] | None = None, targets: Collection[str] | None = None
) -> None:
    """Refuse a mapper that cannot work, with everything that is wrong in one error.

    Args:
        mapper: The mapper. Compositions have checked when they were built that their parts fit together.
        sources: Names of the tensors that there are; None if unknown. More than the mapper reads is fine.
        targets: Names of the tensors that are wanted, all of them and no others; None if unknown.

    Raises:
        ValueError: If a name is read or produced twice, a group cannot be completed from the sources, outputs and
            targets are not the same, or a composition contains itself.
    """
    groups, optional = declared_groups(mapper), mapper.optional_inputs()
    problems = collisions(groups)
    outputs = {name for group in groups for name in group.outputs}
    if sources is not None:
        known = frozenset(sources)
        needed = {name for group in groups for name in group.inputs - known - optional}
        problems += _unknown("groups cannot be completed, because there is no source", needed, known)
    if targets is not None:
        wanted = frozenset(targets)
        problems += _unknown("outputs that no target asks for", outputs - wanted, wanted)
        problems += _unknown("targets that nothing produces", wanted - outputs, outputs)
    raise_problems("The state mapper", problems)


def declared_groups(mapper: ModelStateMapper) -> frozenset[StateGroup]:
    """Return the groups of a mapper.

    Raises:
        ValueError: If it is a composition that contains itself.
    """
    try:
        return mapper.state_dependency_groups()
    except RecursionError as error:
        raise ValueError(f"{type(mapper).__name__} contains itself, so that its groups have no end.") from error


def collisions(groups: Iterable[StateGroup]) -> list[str]:
    """Return what keeps groups from standing side by side: names read or produced twice, and groups that read nothing.

    Args:
        groups: The groups; equal ones collide.
    """
    groups = list(groups)
    problems = [
        *_several("read", groups, lambda group: group.inputs),
        *_several("produced", groups, lambda group: group.outputs),
    ]
    without_inputs = [_shown(group) for group in groups if not group.inputs]
    if without_inputs:
        problems.append(f"groups that read nothing: {capped(sorted(without_inputs), _MAX_SHOWN)}")
    return problems


def check_outputs(mapper: ModelStateMapper, group: StateGroup, outputs: Collection[str]) -> None:
    """Raise ValueError if a mapper has returned something else for a group than the outputs that it has declared."""
    if frozenset(outputs) != group.outputs:
        raise ValueError(
            f"{type(mapper).__name__} returned {listed(outputs) or 'nothing'} for the group of "
            f"{listed(group.inputs)}; it has declared {listed(group.outputs) or 'nothing'}."
        )


def _several(verb: str, groups: list[StateGroup], names_of: Callable[[StateGroup], frozenset[str]]) -> list[str]:
    """Describe the names that more than one group has."""
    counts = Counter(name for group in groups for name in names_of(group))
    several = {name for name, count in counts.items() if count > 1} if len(counts) < counts.total() else ()
    if not several:
        return []
    shown: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for name in names_of(group).intersection(several):
            shown[name].append(_shown(group))
    described = [f"'{name}' ({'; '.join(sorted(own))})" for name, own in sorted(shown.items())]
    return [f"{verb} by more than one group: {capped(described, _MAX_SHOWN)}"]


def _unknown(problem: str, names: Collection[str], known: Collection[str]) -> list[str]:
    return [f"{problem}: {NearestNames(known).described(names)}"] if names else []


def _shown(group: StateGroup) -> str:
    return f"{listed(group.inputs, _MAX_SHOWN) or 'nothing'} -> {listed(group.outputs, _MAX_SHOWN) or 'nothing'}"
