"""Adds sends and receives to a program of compute actions. Plain data, without torch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from d9d.pipelining.actions import (
    ActionBase,
    ActionWorkType,
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
from d9d.pipelining.timeline import ActionCosts, Step, build_step, start_times

__all__ = ["add_communication_ops", "post_receives_early"]


def add_communication_ops(
    compute_actions: Mapping[int, Sequence[ActionBase]], stage_to_rank: Mapping[int, int], num_stages: int
) -> Program:
    """Add the sends and receives that a program needs, such that no order of blocking can lock the ranks.

    All actions of all ranks are put into one order, in which they could start if a forward pass took one unit of time
    and a backward pass two; of actions that start together, those of higher ranks come first. A result that another
    rank needs is sent behind the action that makes it, and received there at the same place of this order. So any two
    ranks see the transfers between them in the same order, and a cycle of waiting ranks cannot be.

    Neighbour stages on one rank need no transfer. A composed action waits for all that its parts need, and its results
    are sent behind it. Actions that are not known stay where they are.

    Args:
        compute_actions: Actions of each rank without sends and receives.
        stage_to_rank: Rank of each stage.
        num_stages: Number of stages over all ranks.

    Raises:
        ValueError: If the compute actions wait for one another, or the placement does not fit them.
    """
    _check_placement(compute_actions, stage_to_rank, num_stages)
    stages = range(num_stages)
    forward_targets = {s: stage_to_rank[s + 1] for s in stages[:-1] if stage_to_rank[s + 1] != stage_to_rank[s]}
    backward_targets = {s: stage_to_rank[s - 1] for s in stages[1:] if stage_to_rank[s - 1] != stage_to_rank[s]}
    program: Program = {rank: [] for rank in compute_actions}
    for rank, action in _in_order_of_start(compute_actions, stage_to_rank, num_stages):
        own = program[rank]
        own.append(action)
        for part in flat_actions((action,)) if type(action) is ComposeAction else (action,):
            if type(part) is ForwardComputeAction:
                stage, microbatch = part.stage_idx, part.microbatch_idx
                if (target := forward_targets.get(stage)) is not None:
                    own.append(ForwardSendAction(stage, microbatch))
                    program[target].append(ForwardReceiveAction(stage + 1, microbatch))
            elif type(part) is BackwardFullInputComputeAction:
                stage, microbatch = part.stage_idx, part.microbatch_idx
                if (target := backward_targets.get(stage)) is not None:
                    own.append(BackwardSendAction(stage, microbatch))
                    program[target].append(BackwardReceiveAction(stage - 1, microbatch))
    return program


def _check_placement(
    compute_actions: Mapping[int, Sequence[ActionBase]], stage_to_rank: Mapping[int, int], num_stages: int
) -> None:
    if set(stage_to_rank) != set(range(num_stages)):
        raise ValueError(f"stage_to_rank places stages {sorted(stage_to_rank)}, but num_stages is {num_stages}.")
    if absent := sorted(set(stage_to_rank.values()) - set(compute_actions)):
        raise ValueError(
            f"Ranks {absent} host stages, but have no actions: ranks with actions are {[*compute_actions]}."
        )


def _in_order_of_start(
    compute_actions: Mapping[int, Sequence[ActionBase]], stage_to_rank: Mapping[int, int], num_stages: int
) -> Iterator[tuple[int, ActionBase]]:
    unit = ActionCosts()
    starts = start_times(
        {
            rank: [_step(action, unit, rank, stage_to_rank, num_stages - 1) for action in actions]
            for rank, actions in compute_actions.items()
        },
        transfer=0.0,
    )
    downwards = sorted(starts, reverse=True)
    actions = [action for rank in downwards for action in compute_actions[rank]]
    ranks = [rank for rank in downwards for _ in starts[rank]]
    times = [start for rank in downwards for start in starts[rank]]
    # Sorting is stable: higher ranks stay first, and each rank keeps its order.
    for index in sorted(range(len(times)), key=times.__getitem__):
        yield ranks[index], actions[index]


def _step(action: ActionBase, unit: ActionCosts, rank: int, stage_to_rank: Mapping[int, int], last_stage: int) -> Step:
    if type(action) is not ComposeAction:
        return build_step(action, unit.of(action), rank, stage_to_rank, last_stage)
    # In a timeline, parts take and give results one by one. Here they must not: sends come behind the whole.
    parts = [build_step(part, 0.0, rank, stage_to_rank, last_stage) for part in flat_actions((action,))]
    gives = tuple(result for part in parts for result in part.gives)
    here = tuple(result for part in parts for result in part.needs_here if result not in gives)
    away = tuple(result for part in parts for result in part.needs_away)
    return Step(action, unit.of(action), here, away, gives)


def post_receives_early(actions: Sequence[ActionBase], num_passes: int) -> list[ActionBase]:
    """Move the receives of a rank ahead of some forward and backward passes, for backends where posting one is free.

    Without that a rank asks for a result at the moment when it needs it, and the transfer is not hidden by anything. The
    order of the receives stays, so that they match the sends. An input is not asked for while as many are held as ever
    in the program and `SPARE_INPUTS` on top, so that this needs next to no memory; a gradient not before the forward pass
    of its microbatch, which tells its shape.

    Args:
        actions: All actions of one rank.
        num_passes: How many compute actions a receive may overtake.
    """
    if num_passes == 0:
        return list(actions)
    others = [action for action in actions if not isinstance(action, _RECEIVES)]
    last_use, forwards = _last_uses(others)
    held = _count_held_inputs(actions, len(others), last_use)
    limit = max(held) + SPARE_INPUTS
    passes: list[int] = []
    receives: dict[int, list[ActionBase]] = {}
    earliest = position = 0
    for action in actions:
        if not isinstance(action, _RECEIVES):
            if action.work_type is ActionWorkType.compute:
                passes.append(position)
            position += 1
            continue
        # Receives go before the other action of this index.
        target = max(earliest, passes[-num_passes] if len(passes) >= num_passes else 0)
        if isinstance(action, BackwardReceiveAction):
            target = max(target, forwards.get((action.stage_idx, action.microbatch_idx), 0) + 1)
        else:
            full = next((index for index in range(position - 1, target - 1, -1) if held[index] >= limit), target - 1)
            target = full + 1
            for index in range(target, position):
                held[index] += 1
        earliest = target
        receives.setdefault(target, []).append(action)
    return [
        action for index in range(len(others) + 1) for action in (*receives.get(index, ()), *others[index : index + 1])
    ]


SPARE_INPUTS = 2
"""Inputs that a rank may hold for `post_receives_early`. Without them, schedules that replace each input that they are
through with, such as 1F1B, ask for the next one when they need it."""

_RECEIVES = (ForwardReceiveAction, BackwardReceiveAction)


def _last_uses(actions: Sequence[ActionBase]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return the index of the last compute action of each stage and microbatch, and that of its forward pass."""
    last_use: dict[tuple[int, int], int] = {}
    forwards: dict[tuple[int, int], int] = {}
    for index, action in enumerate(actions):
        for part in flat_actions((action,)):
            if isinstance(part, ForwardComputeAction):
                forwards[part.stage_idx, part.microbatch_idx] = index
            if isinstance(part, ForwardComputeAction | BackwardFullInputComputeAction | BackwardWeightComputeAction):
                last_use[part.stage_idx, part.microbatch_idx] = index
    return last_use, forwards


def _count_held_inputs(
    actions: Sequence[ActionBase], num_others: int, last_use: Mapping[tuple[int, int], int]
) -> list[int]:
    """Return how many inputs from other ranks are held at each action that is no receive, as the program stands."""
    changes = [0] * (num_others + 1)
    position = 0
    for action in actions:
        if isinstance(action, ForwardReceiveAction):
            changes[position] += 1
            changes[last_use[action.stage_idx, action.microbatch_idx] + 1] -= 1
        position += not isinstance(action, _RECEIVES)
    return list(itertools.accumulate(changes))
