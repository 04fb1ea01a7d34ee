"""Mappers that combine others."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, final

import torch

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, operation_name, ordered_groups
from d9d.model_state.mapper.check import collisions, declared_groups
from d9d.model_state.mapper.names import NearestNames, capped, listed
from d9d.model_state.mapper.pieces import TensorPieces
from d9d.model_state.mapper.stages import link_stages
from d9d.model_state.problems import raise_problems

__all__ = [
    "ModelStateMapperParallel",
    "ModelStateMapperPrefixScope",
    "ModelStateMapperSelectGroups",
    "ModelStateMapperSequential",
    "ModelStateMapperShard",
    "filter_empty_mappers",
]

T = TypeVar("T")


@final
class ModelStateMapperParallel(ModelStateMapper):
    """Runs mappers side by side; each handles its own tensors."""

    def __init__(self, mappers: Sequence[ModelStateMapper]) -> None:
        """Combine mappers. Later changes of the sequence have no effect.

        Raises:
            ValueError: If a tensor is read, or produced, twice.
        """
        self._mappers = tuple(mappers)
        routes = [(group, mapper) for mapper in self._mappers for group in declared_groups(mapper)]
        raise_problems("A Parallel of state mappers", collisions(group for group, _ in routes))
        self._optional = frozenset[str]().union(*(mapper.optional_inputs() for mapper in self._mappers))
        self._groups = frozenset(group for group, _ in routes)
        self._routes = _Routes(routes, self._optional)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the groups of all mappers."""
        return self._groups

    def optional_inputs(self) -> frozenset[str]:
        """Return those of all mappers."""
        return self._optional

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate a group by the mapper that declared it."""
        return self._routes.find(group.keys()).apply(group)

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Trace a group by the mapper that declared it."""
        return self._routes.find(group.keys()).trace(group)

    def inverse(self) -> ModelStateMapper:
        """Return the inverses side by side."""
        return ModelStateMapperParallel(_inverses(self._mappers))

    def explain(self) -> str:
        """Return the mappers below each other."""
        return _tree("Parallel", [mapper.explain() for mapper in self._mappers])


@final
class ModelStateMapperSequential(ModelStateMapper):
    """Runs mappers one after the other, as stages. Tensors that a stage does not read go past it.

    Groups of different stages that hang together are one group of the whole. What a stage reads and no earlier one has
    produced is read from the source.
    """

    def __init__(self, mappers: list[ModelStateMapper]) -> None:
        """Link stages. Later changes of the list have no effect.

        Raises:
            ValueError: If a stage reads what an earlier one has used up, or produces what is there already.
        """
        self._mappers = tuple(mappers)
        linked = link_stages(self._mappers)
        self._groups = frozenset(component.group for component in linked)
        self._optional = frozenset(name for component in linked for name in component.optional)
        self._routes = _Routes([(component.group, component) for component in linked], self._optional)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return what hangs together over all stages."""
        return self._groups

    def optional_inputs(self) -> frozenset[str]:
        """Return the inputs that no stage needs: also those of which only optional inputs of later stages are made."""
        return self._optional

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate a group stage by stage, in an order that is the same on all ranks."""
        return self._routes.find(group.keys()).run(group, lambda mapper, tensors: mapper.apply(tensors))

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Trace a group stage by stage; None if a stage cannot."""
        try:
            return self._routes.find(group.keys()).run(group, _traced)
        except _UntraceableError:
            return None

    def inverse(self) -> ModelStateMapper:
        """Return the inverses of the stages in reverse order, without groups that need only what a stage has dropped.

        Raises:
            NotImplementedError: If a stage has none, or a group needs what a later stage has dropped.
        """
        inverse = ModelStateMapperSequential(_inverses(self._mappers)[::-1])
        known = frozenset(name for group in self._groups for name in group.outputs)
        half_known = [
            group for group in inverse._groups if not (group.inputs <= known or group.inputs.isdisjoint(known))
        ]
        if half_known:
            reasons = [
                f"{listed(group.outputs)} cannot be made again without {listed(group.inputs - known)}, which a stage drops."
                for group in ordered_groups(half_known)
            ]
            raise NotImplementedError(capped(reasons, by_line=True))
        if all(group.inputs <= known for group in inverse._groups):
            return inverse
        return ModelStateMapperSelectGroups(inverse, lambda group: group.inputs <= known)

    def explain(self) -> str:
        """Return the stages below each other."""
        stages = [_tree(f"stage {index + 1}", [mapper.explain()]) for index, mapper in enumerate(self._mappers)]
        return _tree("Sequential", stages)


@final
class ModelStateMapperPrefixScope(ModelStateMapper):
    """Puts a prefix before the names that a mapper reads, and one before those that it produces."""

    def __init__(self, mapper: ModelStateMapper, source_prefix: str = "", target_prefix: str = "") -> None:
        """Take a mapper and its prefixes.

        Args:
            mapper: The mapper, with names relative to the prefixes.
            source_prefix: Goes before what it reads, as it is: a module's name needs its dot.
            target_prefix: Goes before what it produces.
        """
        self._mapper, self._source_prefix, self._target_prefix = mapper, source_prefix, target_prefix
        self._groups = frozenset(
            StateGroup.of(
                [source_prefix + name for name in group.inputs], [target_prefix + name for name in group.outputs]
            )
            for group in mapper.state_dependency_groups()
        )
        self._optional = frozenset(source_prefix + name for name in mapper.optional_inputs())

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the groups with their prefixes."""
        return self._groups

    def optional_inputs(self) -> frozenset[str]:
        """Return the optional inputs with their prefix."""
        return self._optional

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate a group without its prefixes."""
        return self._with_prefix(self._mapper.apply(self._without_prefix(group)))

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Trace a group without its prefixes."""
        traced = self._mapper.trace(self._without_prefix(group))
        return None if traced is None else self._with_prefix(traced)

    def inverse(self) -> ModelStateMapper:
        """Return the inverse with exchanged prefixes."""
        return ModelStateMapperPrefixScope(self._mapper.inverse(), self._target_prefix, self._source_prefix)

    def explain(self) -> str:
        """Return the mapper below the prefixes."""
        return _tree(f"PrefixScope '{self._source_prefix}' -> '{self._target_prefix}'", [self._mapper.explain()])

    def _without_prefix(self, group: Mapping[str, T]) -> dict[str, T]:
        foreign = [name for name in group if not name.startswith(self._source_prefix)]
        if foreign:
            raise ValueError(f"{listed(foreign)} does not begin with the source prefix '{self._source_prefix}'.")
        return {name[len(self._source_prefix) :]: tensor for name, tensor in group.items()}

    def _with_prefix(self, group: Mapping[str, T]) -> dict[str, T]:
        return {self._target_prefix + name: tensor for name, tensor in group.items()}


@final
class ModelStateMapperSelectGroups(ModelStateMapper):
    """Keeps some of a mapper's groups, such as those that make the parameters of one pipeline stage."""

    def __init__(
        self,
        mapper: ModelStateMapper,
        keep: Callable[[StateGroup], bool],
        *,
        outputs: Collection[str] | None = None,
    ) -> None:
        """Take a mapper and what to keep.

        Args:
            mapper: The mapper.
            keep: Tells for each group whether it stays; asked once, now.
            outputs: Of what these groups make, only these names are kept; None keeps everything.
        """
        self._mapper = mapper
        chosen = [group for group in mapper.state_dependency_groups() if keep(group)]
        made = frozenset(name for group in chosen for name in group.outputs)
        self._left_out = frozenset() if outputs is None else made.difference(outputs)
        self._groups = frozenset(StateGroup(group.inputs, group.outputs - self._left_out) for group in chosen)
        inputs = frozenset(name for group in self._groups for name in group.inputs)
        self._optional = mapper.optional_inputs() & inputs
        self._routes = _Routes([(group, mapper) for group in self._groups], self._optional)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the groups that were kept."""
        return self._groups

    def optional_inputs(self) -> frozenset[str]:
        """Return those of the groups that were kept."""
        return self._optional

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate a group that was kept."""
        return self._kept(self._routes.find(group.keys()).apply(group))

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Trace a group that was kept."""
        traced = self._routes.find(group.keys()).trace(group)
        return None if traced is None else self._kept(traced)

    def inverse(self) -> ModelStateMapper:
        """Return the inverse, of which those groups are kept that make an input of this mapper.

        Raises:
            NotImplementedError: If the mapper has none, or outputs of the groups are not kept.
        """
        if self._left_out:
            raise NotImplementedError(
                f"the groups that were selected cannot be inverted without {listed(self._left_out)}, which they make and "
                f"`outputs` does not keep."
            )
        inputs = frozenset(name for group in self._groups for name in group.inputs)
        return ModelStateMapperSelectGroups(self._mapper.inverse(), lambda group: not group.outputs.isdisjoint(inputs))

    def explain(self) -> str:
        """Return the groups that were kept, with what they come from."""
        lines = [str(group) for group in ordered_groups(self._groups)]
        return _tree(f"{len(lines)} groups of {operation_name(self._mapper)}", lines)

    def _kept(self, produced: dict[str, T]) -> dict[str, T]:
        return {name: value for name, value in produced.items() if name not in self._left_out}


@final
class ModelStateMapperShard(ModelStateMapper):
    """Keeps one of several parts of a mapper's groups, so that processes share the work.

    Parts differ by at most one group and are ranges of the groups in the order of their names: tensors of one layer are
    mostly in one file.
    """

    def __init__(self, sub_mapper: ModelStateMapper, total_shards: int, current_shard: int) -> None:
        """Take a mapper and which part to keep.

        Args:
            sub_mapper: The mapper, the same in all parts.
            total_shards: Number of parts.
            current_shard: Number of the part, from 0.

        Raises:
            ValueError: If there is no such part.
        """
        if not 0 <= current_shard < total_shards:
            raise ValueError(
                f"current_shard ({current_shard}) must be in 0 to total_shards - 1; total_shards is {total_shards}."
            )
        self._total_shards, self._current_shard = total_shards, current_shard
        groups = ordered_groups(sub_mapper.state_dependency_groups())
        first, last = (len(groups) * shard // total_shards for shard in (current_shard, current_shard + 1))
        own = frozenset(groups[first:last])
        self._selected = ModelStateMapperSelectGroups(sub_mapper, own.__contains__)

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return the groups of this part."""
        return self._selected.state_dependency_groups()

    def optional_inputs(self) -> frozenset[str]:
        """Return those of this part."""
        return self._selected.optional_inputs()

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate a group of this part."""
        return self._selected.apply(group)

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Trace a group of this part."""
        return self._selected.trace(group)

    def inverse(self) -> ModelStateMapper:
        """Return the inverse, of which those groups are kept that make an input of this part."""
        return self._selected.inverse()

    def explain(self) -> str:
        """Return the groups of this part."""
        return _tree(f"Shard {self._current_shard} of {self._total_shards}", [self._selected.explain()])


def filter_empty_mappers(mappers: Sequence[ModelStateMapper]) -> list[ModelStateMapper]:
    """Return the mappers that have groups."""
    return [mapper for mapper in mappers if mapper.state_dependency_groups()]


@final
class _Routes(Generic[T]):
    """Finds who is responsible for a group, by the names of its inputs."""

    def __init__(self, routes: Iterable[tuple[StateGroup, T]], optional: frozenset[str]) -> None:
        self._by_input = {name: route for route in routes for name in route[0].inputs}
        self._optional = optional

    def find(self, names: Collection[str]) -> T:
        """Return who is responsible.

        Args:
            names: Inputs of one group; optional ones may be missing.

        Raises:
            ValueError: If these are not the inputs of one group.
        """
        unknown = [name for name in names if name not in self._by_input]
        if unknown or not names:
            described = NearestNames(self._by_input).described(unknown) or "nothing"
            raise ValueError(f"the mapper was given {described}, which none of its groups reads.")
        group, to = self._by_input[next(iter(names))]
        foreign = [name for name in names if name not in group.inputs]
        missing = group.inputs.difference(names, self._optional)
        if foreign or missing:
            problem = f"{listed(foreign)} of another group" if foreign else f"no {listed(missing)}"
            raise ValueError(f"the mapper was given {problem} for the group {listed(group.inputs)}.")
        return to


class _UntraceableError(Exception):
    """A stage needs the data itself."""


def _traced(mapper: ModelStateMapper, tensors: dict[str, TensorPieces]) -> dict[str, TensorPieces]:
    traced = mapper.trace(tensors)
    if traced is None:
        raise _UntraceableError
    return traced


def _inverses(mappers: Iterable[ModelStateMapper]) -> list[ModelStateMapper]:
    """Return the inverses of mappers, or all reasons why there are none."""
    inverses: list[ModelStateMapper] = []
    reasons: list[str] = []
    for mapper in mappers:
        try:
            inverses.append(mapper.inverse())
        except NotImplementedError as error:
            reasons.append(str(error))
    if reasons:
        # Layers have the same one.
        counted = Counter(reasons)
        shown = [reason if count == 1 else f"{reason} ({count} times)" for reason, count in counted.items()]
        raise NotImplementedError(capped(shown, by_line=True))
    return inverses


def _tree(name: str, children: Sequence[str]) -> str:
    """Return a name and what is below it, indented."""
    return "\n".join([name, *(f"  {line}" for child in children for line in child.splitlines())])
