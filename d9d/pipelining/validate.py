"""Checks that a program is complete and that its ranks cannot lock one another. Plain data, without torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardReceiveAction,
    BackwardSendAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    ForwardReceiveAction,
    ForwardSendAction,
    Program,
    flat_actions,
)

__all__ = ["ProgramError", "validate_program"]

_WINDOW = 6
"""Positions that the grid of an error shows on each side of the bad one."""


class ProgramError(ValueError):
    """A program that would hang or compute something wrong. Its message shows where, in a grid of ranks and positions."""


def validate_program(program: Program, stage_to_rank: Mapping[int, int] | None = None) -> None:
    """Check a program with its sends and receives, in time linear in the number of its actions.

    Each stage runs each microbatch forward once, with its input there: received, or made before by its neighbour on
    the same rank. If there are backward passes at all, each stage runs each microbatch backward once, after its forward
    pass and with the gradients of its output there: in full, or as gradients of inputs that those of weights follow.
    Each send has one receive on the right rank, and the other way round. The program does not lock even if each send
    and each receive blocks its rank until the other rank comes to the matching one. Actions that are not known are
    left alone.

    Args:
        program: Actions of each rank.
        stage_to_rank: Rank of each stage. Without it, a stage belongs to the rank that first runs it forward.

    Raises:
        ProgramError: With what is wrong, and a grid of the actions around it.
    """
    cells = {
        rank: [_Cell(index, part) for index, action in enumerate(actions) for part in flat_actions((action,))]
        for rank, actions in program.items()
    }
    placement = _find_placement(cells) if stage_to_rank is None else stage_to_rank
    if absent := sorted(set(placement.values()) - set(program)):
        raise ProgramError(f"Ranks {absent} host stages, but have no actions: ranks with actions are {[*program]}.")
    ranks = {rank: _RankCheck(rank, placement) for rank in sorted(program)}
    for rank, check in ranks.items():
        for index, action in cells[rank]:
            if (problem := check.problem_with(action)) is not None:
                raise _error(program, rank, index, problem)
    transfers = {rank: list(_transfers(own)) for rank, own in cells.items()}
    _check_pairs(program, transfers)
    _check_complete(program, cells, ranks, placement)
    _check_rendezvous(program, transfers)


class _Cell(NamedTuple):
    """An action that is not composed, at its position in the program of its rank."""

    position: int
    action: ActionBase


class _Transfer(NamedTuple):
    """What a send and the matching receive have in common."""

    is_forward: bool
    from_stage: int
    microbatch: int


class _TransferEnd(NamedTuple):
    """One end of a transfer, at its position in the program of its rank."""

    position: int
    is_send: bool
    transfer: _Transfer


_Cells: TypeAlias = Mapping[int, list[_Cell]]
_Transfers: TypeAlias = Mapping[int, list[_TransferEnd]]
_Key: TypeAlias = tuple[int, int]
"""A stage and a microbatch."""


def _find_placement(cells: _Cells) -> dict[int, int]:
    placement: dict[int, int] = {}
    for rank in sorted(cells):
        for _, action in cells[rank]:
            if type(action) is ForwardComputeAction:
                placement.setdefault(action.stage_idx, rank)
    return placement


@final
class _RankCheck:
    """What a rank has done so far. It asks of each action whether it may come next."""

    def __init__(self, rank: int, placement: Mapping[int, int]) -> None:
        self._rank = rank
        self._placement = placement
        self._last_stage = max(placement, default=0)
        self.forward: set[_Key] = set()
        self.backward: set[_Key] = set()
        self.without_weight: set[_Key] = set()
        self._has_input: set[_Key] = set()
        self._has_gradient: set[_Key] = set()
        self._transferred: set[tuple[type[ActionBase], int, int]] = set()

    def problem_with(self, action: ActionBase) -> str | None:
        """Tell what is wrong with the next action, and take it as done."""
        if type(action) is ForwardComputeAction:
            return self._forward(action.stage_idx, action.microbatch_idx)
        if type(action) is BackwardFullInputComputeAction:
            return self._backward(action.stage_idx, action.microbatch_idx, action.full_backward)
        if type(action) is BackwardWeightComputeAction:
            return self._backward_weight(action.stage_idx, action.microbatch_idx)
        if type(action) is ForwardSendAction:
            return self._send(action, self.forward, action.stage_idx + 1)
        if type(action) is BackwardSendAction:
            return self._send(action, self.backward, action.stage_idx - 1)
        if type(action) is ForwardReceiveAction:
            return self._receive(action, self._has_input, action.stage_idx - 1)
        if type(action) is BackwardReceiveAction:
            return self._receive(action, self._has_gradient, action.stage_idx + 1)
        return None

    def _misplaced(self, stage: int) -> str | None:
        host = self._placement.get(stage)
        if host == self._rank:
            return None
        return f"stage {stage} is on {'no rank' if host is None else f'rank {host}'}"

    def _forward(self, stage: int, microbatch: int) -> str | None:
        key = stage, microbatch
        if problem := self._misplaced(stage):
            return problem
        if key in self.forward:
            return "the forward pass has been done before"
        if stage > 0 and key not in self._has_input:
            return f"its input, the output of stage {stage - 1}, has been neither received nor made on this rank"
        self.forward.add(key)
        self._has_input.add((stage + 1, microbatch))
        return None

    def _backward(self, stage: int, microbatch: int, full: bool) -> str | None:
        key = stage, microbatch
        if problem := self._misplaced(stage):
            return problem
        if key not in self.forward:
            return "its forward pass has not been done before"
        if key in self.backward:
            return "the backward pass has been done before"
        if stage < self._last_stage and key not in self._has_gradient:
            return f"its gradients, from stage {stage + 1}, have been neither received nor made on this rank"
        self.backward.add(key)
        if not full:
            self.without_weight.add(key)
        self._has_gradient.add((stage - 1, microbatch))
        return None

    def _backward_weight(self, stage: int, microbatch: int) -> str | None:
        key = stage, microbatch
        if key not in self.backward:
            return "the gradients of inputs have not been computed before"
        if key not in self.without_weight:
            return "the gradients of weights have been computed before"
        self.without_weight.remove(key)
        return None

    def _send(self, action: ForwardSendAction | BackwardSendAction, made: set[_Key], to_stage: int) -> str | None:
        if (action.stage_idx, action.microbatch_idx) not in made:
            return "what it sends has not been made before"
        return self._transfer(action, to_stage)

    def _receive(
        self, action: ForwardReceiveAction | BackwardReceiveAction, there: set[_Key], from_stage: int
    ) -> str | None:
        if problem := self._misplaced(action.stage_idx):
            return problem
        there.add((action.stage_idx, action.microbatch_idx))
        return self._transfer(action, from_stage)

    def _transfer(
        self,
        action: ForwardSendAction | BackwardSendAction | ForwardReceiveAction | BackwardReceiveAction,
        other_stage: int,
    ) -> str | None:
        host = self._placement.get(other_stage)
        if host is None:
            return f"there is no stage {other_stage}"
        if host == self._rank:
            return f"stage {other_stage} is on the same rank, so there is nothing to transfer"
        name = type(action), action.stage_idx, action.microbatch_idx
        if name in self._transferred:
            return "the transfer has been done before"
        self._transferred.add(name)
        return None


def _check_complete(
    program: Program, cells: _Cells, ranks: Mapping[int, _RankCheck], placement: Mapping[int, int]
) -> None:
    microbatches = sorted({microbatch for check in ranks.values() for _, microbatch in check.forward})
    passes = ["forward", "backward"] if any(check.backward for check in ranks.values()) else ["forward"]
    for name in passes:
        for stage, rank in placement.items():
            done = ranks[rank].forward if name == "forward" else ranks[rank].backward
            for microbatch in microbatches:
                if (stage, microbatch) not in done:
                    problem = f"no {name} pass of stage {stage}, microbatch {microbatch}"
                    raise _error(program, rank, len(program[rank]), problem)
    for rank, check in ranks.items():
        for index, action in cells[rank] if check.without_weight else ():
            if type(action) is BackwardFullInputComputeAction:
                key = action.stage_idx, action.microbatch_idx
                if key in check.without_weight:
                    raise _error(program, rank, index, "no action computes the gradients of weights after it")


def _transfers(cells: list[_Cell]) -> Iterator[_TransferEnd]:
    for index, action in cells:
        if type(action) is ForwardSendAction:
            yield _TransferEnd(index, True, _Transfer(True, action.stage_idx, action.microbatch_idx))
        elif type(action) is ForwardReceiveAction:
            yield _TransferEnd(index, False, _Transfer(True, action.stage_idx - 1, action.microbatch_idx))
        elif type(action) is BackwardSendAction:
            yield _TransferEnd(index, True, _Transfer(False, action.stage_idx, action.microbatch_idx))
        elif type(action) is BackwardReceiveAction:
            yield _TransferEnd(index, False, _Transfer(False, action.stage_idx + 1, action.microbatch_idx))


def _check_pairs(program: Program, transfers: _Transfers) -> None:
    ends = {(end.is_send, end.transfer) for own in transfers.values() for end in own}
    for rank in sorted(transfers):
        for index, is_send, transfer in transfers[rank]:
            if (not is_send, transfer) not in ends:
                raise _error(program, rank, index, f"no rank does the matching {'receive' if is_send else 'send'}")


def _check_rendezvous(program: Program, transfers: _Transfers) -> None:
    done = dict.fromkeys(transfers, 0)
    waiting: dict[_Transfer, int] = {}
    runnable = list(transfers)
    while runnable:
        rank = runnable.pop()
        if done[rank] == len(transfers[rank]):
            continue
        transfer = transfers[rank][done[rank]].transfer
        if (peer := waiting.pop(transfer, None)) is None:
            waiting[transfer] = rank
            continue
        for end in (rank, peer):
            done[end] += 1
            runnable.append(end)
    blocked = {r: transfers[r][done[r]].position for r in sorted(transfers) if done[r] < len(transfers[r])}
    if blocked:
        where = ", ".join(f"rank {rank} at {program[rank][index]}" for rank, index in blocked.items())
        rank, index = next(iter(blocked.items()))
        raise _error(program, rank, index, f"ranks whose transfers block wait for one another here: {where}")


def _error(program: Program, rank: int, position: int, problem: str) -> ProgramError:
    text = _cell_text(program[rank], position)
    return ProgramError(f"Rank {rank}, position {position} ({text}): {problem}.\n{_grid(program, rank, position)}")


def _grid(program: Program, bad_rank: int, bad_position: int) -> str:
    columns = range(max(0, bad_position - _WINDOW), bad_position + _WINDOW + 1)
    rows = [["", *map(str, columns)]]
    for rank in sorted(program):
        texts = [_cell_text(program[rank], position) for position in columns]
        if rank == bad_rank:
            texts[bad_position - columns.start] = f">{texts[bad_position - columns.start]}<"
        rows.append([f"rank {rank}", *texts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell_text(actions: Sequence[ActionBase], position: int) -> str:
    if position < len(actions):
        return str(actions[position])
    return "end" if position == len(actions) else ""
