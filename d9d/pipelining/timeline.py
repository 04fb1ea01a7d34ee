"""How long a pipeline program takes, by a simulation of events. Plain data, without torch.

Each rank does its actions in order and waits where one needs a result that is not there yet. Transfers run beside the
compute, so of them only the latency counts. Nothing here knows seconds: costs and times share whatever unit the costs have.

[Note: Exact types] Passes over programs look at each of up to a million actions. They compare the type of an action where
`isinstance` would do, because `isinstance` on abstract classes is several times slower when the answer is no. So a class
that derives from one of the known actions counts as an action that is not known.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardReceiveAction,
    BackwardSendAction,
    BackwardWeightComputeAction,
    ComposeAction,
    ForwardComputeAction,
    ForwardReceiveAction,
    ForwardSendAction,
    Program,
    flat_actions,
)

__all__ = [
    "ActionCosts",
    "Step",
    "Timeline",
    "TimelineEvent",
    "build_step",
    "simulate",
    "start_times",
]

_TRANSFERS = frozenset((ForwardSendAction, ForwardReceiveAction, BackwardSendAction, BackwardReceiveAction))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActionCosts:
    """How long actions take, in any one unit of time.

    Attributes:
        forward: One microbatch through one stage.
        backward_input: Its gradients of the stage's inputs.
        backward_weight: Its gradients of the stage's weights; a full backward pass takes both.
        transfer: Latency of a result on its way to a neighbour stage on another rank.
        measured: Costs of single actions by their text form, which win over the ones above. The cost of a composed
            action is shared among its parts in the ratio of their own costs.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    measured: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        named = {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
            "transfer": self.transfer,
        }
        for name, cost in {**named, **(self.measured or {})}.items():
            if cost < 0:
                raise ValueError(f"The cost of {name} ({cost}) must not be negative.")

    def of(self, action: ActionBase) -> float:
        """Return the cost of an action: the measured one if there is one, and 0 for an action that is not known."""
        if self.measured is not None and (cost := self.measured.get(str(action))) is not None:
            return cost
        if type(action) is ForwardComputeAction:
            return self.forward
        if type(action) is BackwardFullInputComputeAction:
            return self.backward_input + self.backward_weight if action.full_backward else self.backward_input
        if type(action) is BackwardWeightComputeAction:
            return self.backward_weight
        return sum(map(self.of, action.actions)) if type(action) is ComposeAction else 0.0

    def of_parts(self, action: ComposeAction, parts: Sequence[ActionBase]) -> list[float]:
        """Return the costs of the parts of a composed action, which add up to its own."""
        own = [self.of(part) for part in parts]
        total, own_total = self.of(action), sum(own)
        if own_total == 0:
            return [total / len(parts)] * len(parts)
        return [cost * total / own_total for cost in own]


class TimelineEvent(NamedTuple):
    """One action of a rank, a composed one as a whole."""

    action: ActionBase
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When each rank does what.

    Attributes:
        events: Actions of each rank in their order, without sends and receives.
        busy: Time for which each rank computes.
        peak_activations: Most activations that are alive at once on each rank: a microbatch in a stage counts from its
            forward pass to the gradients of its weights.
        num_stages: Number of stages that each rank hosts.
    """

    events: Mapping[int, Sequence[TimelineEvent]]
    busy: Mapping[int, float]
    peak_activations: Mapping[int, int]
    num_stages: Mapping[int, int]

    @property
    def makespan(self) -> float:
        """Time from the start to the end of the last action."""
        return max((events[-1].end for events in self.events.values() if events), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the time of all ranks in which they wait."""
        total = len(self.events) * self.makespan
        return 1 - sum(self.busy.values()) / total if total else 0.0

    @property
    def peak_microbatches(self) -> dict[int, float]:
        """`peak_activations` as a number of microbatches through all layers of the rank."""
        return {rank: peak / max(self.num_stages[rank], 1) for rank, peak in self.peak_activations.items()}


class Step(NamedTuple):
    """What `start_times` has to know of an action. Results have whole numbers as names."""

    action: ActionBase
    cost: float
    needs_here: tuple[int, ...]
    """Results that this rank makes."""
    needs_away: tuple[int, ...]
    """Results that come from another rank."""
    gives: tuple[int, ...]
    """Results that are there when the action is over."""


_MICROBATCH = 2
_STAGE = _MICROBATCH << 32
_BACKWARD = 1
"""Result of stage s, microbatch m, is ``s * _STAGE + m * _MICROBATCH``, and the gradient of its input one more."""


def build_step(action: ActionBase, cost: float, rank: int, stage_to_rank: Mapping[int, int], last_stage: int) -> Step:
    """Find what an action that is not composed needs and gives. See [Note: Exact types]."""
    if type(action) is ForwardComputeAction:
        stage = action.stage_idx
        result = stage * _STAGE + action.microbatch_idx * _MICROBATCH
        if stage == 0:
            return Step(action, cost, (), (), (result,))
        if stage_to_rank.get(stage - 1) == rank:
            return Step(action, cost, (result - _STAGE,), (), (result,))
        return Step(action, cost, (), (result - _STAGE,), (result,))
    if type(action) is BackwardFullInputComputeAction:
        stage = action.stage_idx
        forward = stage * _STAGE + action.microbatch_idx * _MICROBATCH
        result = forward + _BACKWARD
        if stage == last_stage:
            return Step(action, cost, (forward,), (), (result,))
        if stage_to_rank.get(stage + 1) == rank:
            return Step(action, cost, (forward, result + _STAGE), (), (result,))
        return Step(action, cost, (forward,), (result + _STAGE,), (result,))
    if type(action) is BackwardWeightComputeAction:
        result = action.stage_idx * _STAGE + action.microbatch_idx * _MICROBATCH + _BACKWARD
        return Step(action, cost, (result,), (), ())
    return Step(action, cost, (), (), ())


def start_times(steps: Mapping[int, Sequence[Step]], transfer: float) -> dict[int, list[float]]:
    """Find when each step of each rank can start.

    A rank runs until it needs a result that is not there, and is woken when it comes, so each step is looked at twice
    at most.

    Args:
        steps: Steps of each rank, in their order.
        transfer: Latency of results that come from another rank.

    Raises:
        ValueError: If the ranks wait for one another.
    """
    starts: dict[int, list[float]] = {rank: [] for rank in steps}
    clocks = dict.fromkeys(steps, 0.0)
    ready: dict[int, float] = {}
    waiting: dict[int, list[int]] = {}
    runnable = list(steps)
    while runnable:
        rank = runnable.pop()
        clock, started, todo = clocks[rank], starts[rank], steps[rank]
        for index in range(len(started), len(todo)):
            _, cost, needs_here, needs_away, gives = todo[index]
            try:
                for result in needs_here:
                    clock = max(clock, ready[result])
                for result in needs_away:
                    clock = max(clock, ready[result] + transfer)
            except KeyError as missing:
                waiting.setdefault(missing.args[0], []).append(rank)
                break
            started.append(clock)
            clock += cost
            for result in gives:
                ready[result] = clock
                runnable += waiting.pop(result, ())
        clocks[rank] = clock
    _check_all_started(steps, starts)
    return starts


def _check_all_started(steps: Mapping[int, Sequence[Step]], starts: Mapping[int, Sequence[float]]) -> None:
    blocked = {rank: len(starts[rank]) for rank in sorted(steps) if len(starts[rank]) < len(steps[rank])}
    if blocked:
        where = ", ".join(f"rank {rank} at {steps[rank][index].action}" for rank, index in blocked.items())
        raise ValueError(f"The program cannot go on, because its ranks wait for results that never come: {where}.")


_RankSteps: TypeAlias = tuple[list[Step], list[tuple[ActionBase, int]]]
"""The steps of a rank, and its actions with the number of steps that each one has."""


def simulate(program: Program, costs: ActionCosts) -> Timeline:
    """Find when each rank of a program does what, in time linear in the number of its actions.

    A forward pass waits for the one of the stage before, a backward pass for the one of the stage after, and weight
    gradients for the input gradients. Parts of a composed action run one after another, and each waits for its own
    needs and gives its result when it ends. Sends and receives take no time on their ranks and may be missing.

    Args:
        program: Actions of each rank.
        costs: How long the actions take.

    Raises:
        ValueError: If the program cannot go on; the message names the action that each rank is blocked at.
    """
    stage_to_rank = _hosts(program)
    last_stage = max(stage_to_rank, default=0)
    built = {rank: _rank_steps(rank, actions, costs, stage_to_rank, last_stage) for rank, actions in program.items()}
    starts = start_times({rank: steps for rank, (steps, _) in built.items()}, costs.transfer)
    hosts = list(stage_to_rank.values())
    return Timeline(
        events={rank: list(_events(*built[rank], starts[rank])) for rank in program},
        busy={rank: sum(step.cost for step in steps) for rank, (steps, _) in built.items()},
        peak_activations={rank: _peak_activations(step.action for step in steps) for rank, (steps, _) in built.items()},
        num_stages={rank: hosts.count(rank) for rank in program},
    )


def _hosts(program: Program) -> dict[int, int]:
    return {
        action.stage_idx: rank
        for rank, actions in program.items()
        for action in flat_actions(actions)
        if type(action) is ForwardComputeAction
    }


def _rank_steps(
    rank: int, actions: Iterable[ActionBase], costs: ActionCosts, stage_to_rank: Mapping[int, int], last_stage: int
) -> _RankSteps:
    steps: list[Step] = []
    sizes: list[tuple[ActionBase, int]] = []
    for action in actions:
        if type(action) is ComposeAction:
            parts = [part for part in flat_actions((action,)) if type(part) not in _TRANSFERS]
            prices = costs.of_parts(action, parts) if parts else []
            steps += [build_step(p, c, rank, stage_to_rank, last_stage) for p, c in zip(parts, prices, strict=True)]
            sizes.append((action, len(parts)))
        elif type(action) not in _TRANSFERS:
            steps.append(build_step(action, costs.of(action), rank, stage_to_rank, last_stage))
            sizes.append((action, 1))
    return steps, sizes


def _events(
    steps: Sequence[Step], sizes: Iterable[tuple[ActionBase, int]], starts: Sequence[float]
) -> Iterator[TimelineEvent]:
    position = 0
    for action, size in sizes:
        if size:
            last = position + size - 1
            yield TimelineEvent(action, starts[position], starts[last] + steps[last].cost)
            position += size


def _peak_activations(actions: Iterable[ActionBase]) -> int:
    alive = peak = 0
    for action in actions:
        if type(action) is ForwardComputeAction:
            alive += 1
            peak = max(peak, alive)
        elif type(action) is BackwardWeightComputeAction or (
            type(action) is BackwardFullInputComputeAction and action.full_backward
        ):
            alive -= 1
    return peak
