"""Links mappers that run one after the other: which of their groups hang together, and in which order they run.

[Note: one order on all ranks]
A stage may gather tensors over ranks. The ranks then must do so in one order, and the order of a set of strings differs
from process to process. So the order is made once, by the names, and sets are only asked what they contain.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar, final

from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, ordered_groups
from d9d.model_state.mapper.check import collisions, declared_groups
from d9d.model_state.mapper.names import NearestNames, listed
from d9d.model_state.problems import raise_problems

__all__ = ["LinkedGroup", "link_stages"]

V = TypeVar("V")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One group of one stage.

    Attributes:
        stage: Number of the stage, from 0.
        mapper: What translates the group.
        group: The group.
        optional: Inputs that the mapper can do without.
        can_be_left_out: Whether everything that the group produces is optional for those who read it.
    """

    stage: int
    mapper: ModelStateMapper
    group: StateGroup
    optional: frozenset[str]
    can_be_left_out: bool


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinkedGroup:
    """Groups of several stages that hang together.

    Attributes:
        group: What they read from the source, and what is there after the last stage.
        optional: Inputs that they can do without.
        stages: The steps of each stage, in their order. See [Note: one order on all ranks].
    """

    group: StateGroup
    optional: frozenset[str]
    stages: tuple[tuple[_Step, ...], ...]

    def run(
        self, tensors: Mapping[str, V], translate: Callable[[ModelStateMapper, dict[str, V]], dict[str, V]]
    ) -> dict[str, V]:
        """Run all steps.

        Args:
            tensors: Inputs of the group; optional ones may be missing.
            translate: Runs a mapper on one of its groups.

        Returns:
            Outputs of the group.

        Raises:
            ValueError: If some inputs of a step are there, but one that it needs is missing.
        """
        values = dict(tensors)
        for steps in self.stages:
            produced: dict[str, V] = {}
            for step in steps:
                # An input goes with its step, so that its memory can be freed.
                own = {name: values.pop(name) for name in sorted(step.group.inputs) if name in values}
                missing = step.group.inputs - own.keys() - step.optional
                if missing and (own or not step.can_be_left_out):
                    raise ValueError(
                        f"stage {step.stage + 1} needs {listed(missing)} to make {listed(step.group.outputs, 3)}."
                    )
                if own:
                    produced.update(translate(step.mapper, own))
            # Only now: steps of one stage may exchange names.
            values.update(produced)
        return values


def link_stages(mappers: Sequence[ModelStateMapper]) -> list[LinkedGroup]:
    """Link the groups of mappers that run one after the other, in time linear in their number.

    Args:
        mappers: The stages.

    Returns:
        The groups of the whole, in an order that depends on names only.

    Raises:
        ValueError: If the stages do not fit together, with all problems.
    """
    links = _Links()
    for mapper in mappers:
        links.add_stage(mapper)
    raise_problems("A Sequential of state mappers", links.problems)
    return links.components()


@final
class _Links:
    """Follows each tensor from the group that produces it to the one that reads it."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._steps: list[_Step] = []
        self._num_stages = 0
        self._from_source: dict[str, int] = {}
        """What is read from the source, and the step that reads it."""
        self._readers: dict[tuple[int, str], int] = {}
        """For a step and a name that it produces, the step that reads it."""
        self._alive: dict[str, int] = {}
        """What is there after the last stage so far, and the step that has produced it."""
        self._used_up: dict[str, int] = {}
        """What is not there any more, and the stage that has read it."""

    def add_stage(self, mapper: ModelStateMapper) -> None:
        groups = ordered_groups(declared_groups(mapper))
        optional = mapper.optional_inputs()
        stage = self._num_stages
        self.problems += [f"stage {stage + 1}: {problem}" for problem in collisions(groups)]
        first_step = len(self._steps)
        for group in groups:
            own_optional = optional & group.inputs if optional else optional
            self._steps.append(_Step(stage, mapper, group, own_optional, can_be_left_out=False))
        used_up = {name for group in groups for name in group.inputs if not self._is_there(name)}
        if used_up:
            stages = sorted({self._used_up[name] + 1 for name in used_up})
            self.problems.append(
                f"stage {stage + 1} cannot complete groups: stage {', '.join(map(str, stages))} has used up "
                f"{NearestNames(self._alive).described(used_up)}"
            )
        for index, group in enumerate(groups, start=first_step):
            for name in group.inputs:
                self._read(index, name)
        twice = {name for group in groups for name in group.outputs if name in self._alive}
        if twice:
            self.problems.append(f"stage {stage + 1} produces what an earlier one has produced: {listed(twice)}")
        for index, group in enumerate(groups, start=first_step):
            self._alive.update(dict.fromkeys(group.outputs, index))
        self._num_stages += 1

    def components(self) -> list[LinkedGroup]:
        steps = self._steps_that_know_their_readers()
        roots = self._roots()
        members: dict[int, list[_Step]] = defaultdict(list)
        inputs: dict[int, list[str]] = defaultdict(list)
        outputs: dict[int, list[str]] = defaultdict(list)
        optional: dict[int, list[str]] = defaultdict(list)
        for index, root in enumerate(roots):
            members[root].append(steps[index])
        for name, index in self._from_source.items():
            inputs[roots[index]].append(name)
            if steps[index].can_be_left_out or name in steps[index].optional:
                optional[roots[index]].append(name)
        for name, index in self._alive.items():
            outputs[roots[index]].append(name)
        return [
            LinkedGroup(
                StateGroup.of(inputs.get(root, ()), outputs.get(root, ())),
                frozenset(optional.get(root, ())),
                _by_stage(own),
            )
            for root, own in members.items()
        ]

    def _is_there(self, name: str) -> bool:
        return name in self._alive or name not in self._used_up

    def _read(self, index: int, name: str) -> None:
        if name in self._alive:
            self._readers[self._alive.pop(name), name] = index
        else:
            self._from_source[name] = index
        self._used_up[name] = self._steps[index].stage

    def _steps_that_know_their_readers(self) -> list[_Step]:
        steps = list(self._steps)
        for index in reversed(range(len(steps))):
            step = steps[index]
            readers = [(self._readers.get((index, name)), name) for name in step.group.outputs]
            if readers and all(
                reader is not None and (name in steps[reader].optional or steps[reader].can_be_left_out)
                for reader, name in readers
            ):
                steps[index] = dataclasses.replace(step, can_be_left_out=True)
        return steps

    def _roots(self) -> list[int]:
        """Return for each step the first one of those that it hangs together with (union-find, halving the paths)."""
        parents = list(range(len(self._steps)))

        def root(index: int) -> int:
            while parents[index] != index:
                parents[index] = parents[parents[index]]
                index = parents[index]
            return index

        for (producer, _), reader in self._readers.items():
            first, second = root(producer), root(reader)
            parents[max(first, second)] = min(first, second)
        return [root(index) for index in range(len(parents))]


def _by_stage(steps: list[_Step]) -> tuple[tuple[_Step, ...], ...]:
    return tuple(tuple(own) for _, own in groupby(steps, key=lambda step: step.stage))
