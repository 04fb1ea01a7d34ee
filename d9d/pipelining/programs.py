"""Pipeline schedules whose stages are laid over the ranks in loops. Plain data, without torch.

Each schedule is a pure function from a rank and the sizes of the pipeline to the compute actions of that rank. A program
builder makes these for all ranks and adds the communication. The local stages of a rank are called chunks, from 0.

[Note: Any number of microbatches] Schedules are regular for some numbers of microbatches, such as the multiples of the
number of ranks. For others we take the next such number and drop the actions of the microbatches that do not exist. What
is left is still a program in which nothing waits in vain, because no microbatch needs anything of another one.
"""

import abc
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    Program,
    flat_actions,
)
from d9d.pipelining.communications import add_communication_ops
from d9d.pipelining.placement import ScheduleStyle, build_stage_to_host_rank_topology

__all__ = [
    "ForwardOnlyPipelineProgramBuilder",
    "Interleaved1F1BPipelineProgramBuilder",
    "LoopedBFSPipelineProgramBuilder",
    "PipelineProgramBuilder",
    "check_sizes",
    "interleaved_1f1b",
    "looped_bfs",
    "one_forward_one_backward",
    "splits_backward",
    "with_communication",
    "zero_bubble_1p",
]


class PipelineProgramBuilder(abc.ABC):
    """Makes the program of a schedule for pipelines of any size."""

    @abc.abstractmethod
    def compose(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the program of all ranks, with sends and receives.

        Raises:
            ValueError: If a size is below 1.
        """

    @property
    @abc.abstractmethod
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""

    @property
    @abc.abstractmethod
    def topology_style(self) -> ScheduleStyle:
        """How the stages are laid over the ranks."""


def splits_backward(builder: PipelineProgramBuilder, pp_size: int) -> bool:
    """Tell whether a schedule computes gradients of weights apart in any pack; small packs alone may not need it."""
    program = builder.compose(num_microbatches=2 * pp_size + 1, pp_size=pp_size)
    return any(
        type(action) is BackwardWeightComputeAction for rank in program for action in flat_actions(program[rank])
    )


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        ValueError: Names the first such size.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1.")


def with_communication(compute: Program, builder: PipelineProgramBuilder) -> Program:
    """Add sends and receives to the compute program of a builder."""
    num_stages = len(compute) * builder.num_stages_per_rank
    topology = build_stage_to_host_rank_topology(len(compute), num_stages, builder.topology_style)
    return add_communication_ops(compute, topology, num_stages)


def looped_bfs(
    rank: int, pp_size: int, num_microbatches: int, num_stages_per_rank: int, has_backward: bool
) -> list[ActionBase]:
    """List the compute actions of a rank, breadth first: each chunk runs all microbatches before the next one does.

    Backward passes follow all forward passes, from the last chunk to the first. All activations are alive in between.
    With one stage per rank this is GPipe.

    Source: GPipe, Huang et al. 2019, arXiv:1811.06965; breadth-first pipelines, Lamy-Poirier 2022, arXiv:2211.05953.
    """
    stages = range(rank, pp_size * num_stages_per_rank, pp_size)
    microbatches = range(num_microbatches)
    actions: list[ActionBase] = [ForwardComputeAction(s, m) for s in stages for m in microbatches]
    if has_backward:
        actions += [_full_backward(s, m) for s in reversed(stages) for m in microbatches]
    return actions


def one_forward_one_backward(rank: int, pp_size: int, num_microbatches: int, lookahead: int) -> list[ActionBase]:
    """List the compute actions of a rank that hosts one stage and alternates forward and backward passes.

    A rank starts with a forward pass for each rank behind it, which fills the pipeline until the first gradient comes
    back. So the activations of at most `pp_size - rank + lookahead` microbatches are alive.

    Args:
        rank: Pipeline rank.
        pp_size: Number of pipeline ranks.
        num_microbatches: Number of microbatches in a pack.
        lookahead: Forward passes that all ranks but the last one do on top before their first backward pass, at the
            price of as many activations. With one of them, a rank has something to do while a result is on its way;
            the classic schedule has none.

    Source: PipeDream-Flush, in Narayanan et al. 2021, arXiv:2104.04473.
    """
    is_last = rank == pp_size - 1
    warmup = 0 if is_last else pp_size - 1 - rank + lookahead
    forwards = [ForwardComputeAction(rank, m) for m in range(num_microbatches)]
    backwards = [_full_backward(rank, m) for m in range(num_microbatches)]
    return [*_alternate(forwards, backwards, warmup)]


def interleaved_1f1b(rank: int, pp_size: int, num_microbatches: int, num_stages_per_rank: int) -> list[ActionBase]:
    """List the compute actions of a rank that hosts several stages and alternates forward and backward passes.

    Microbatches come in rounds of `pp_size`: a round runs through all chunks before the next one starts. A rank starts
    with all chunks but the last one of a round, and two forward passes for each rank behind it. This divides the
    bubble by the number of chunks, and costs activations and communication.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2. See [Note: Any number of microbatches].
    """
    warmup = (num_stages_per_rank - 1) * pp_size + 2 * (pp_size - 1 - rank)
    return _interleave(rank, pp_size, num_microbatches, num_stages_per_rank, warmup)


def zero_bubble_1p(rank: int, pp_size: int, num_microbatches: int, num_stages_per_rank: int) -> list[ActionBase]:
    """List the compute actions of a rank that splits backward passes and alternates forward passes with them.

    Gradients of inputs are computed at once, as the rank before waits for them, those of weights later: `rank` of them
    stay pending until the end, where they fill the time in which the rank would wait. With one stage, `pp_size`
    activations are alive on each rank, as on the first one of the classic schedule, and with costs f, i and w of a
    microbatch through a rank, the bubble is ``(pp_size - 1) * (f + i - w) / num_stages_per_rank``.

    Source: ZB-H1 in Qi et al. 2023, arXiv:2401.10241, and its analogue for the interleaved schedule.
    See [Note: Any number of microbatches].
    """
    warmup = (num_stages_per_rank - 1) * pp_size + pp_size - 1 - rank
    return _split_backward(_interleave(rank, pp_size, num_microbatches, num_stages_per_rank, warmup), pending=rank)


def _full_backward(stage: int, microbatch: int) -> BackwardFullInputComputeAction:
    return BackwardFullInputComputeAction(stage, microbatch, full_backward=True)


def _alternate(
    forwards: Sequence[ForwardComputeAction], backwards: Sequence[BackwardFullInputComputeAction], warmup: int
) -> list[ForwardComputeAction | BackwardFullInputComputeAction]:
    """Do some forward passes, then one forward and one backward pass in turn, then the backward passes that are left."""
    turns = itertools.zip_longest(forwards[warmup:], backwards)
    return [*forwards[:warmup], *(action for turn in turns for action in turn if action is not None)]


def _interleave(
    rank: int, pp_size: int, num_microbatches: int, num_stages_per_rank: int, warmup: int
) -> list[ActionBase]:
    stages = range(rank, pp_size * num_stages_per_rank, pp_size)
    rounds = [range(first, first + pp_size) for first in range(0, num_microbatches, pp_size)]
    forwards = [ForwardComputeAction(s, m) for microbatches in rounds for s in stages for m in microbatches]
    backwards = [_full_backward(s, m) for microbatches in rounds for s in reversed(stages) for m in microbatches]
    actions = _alternate(forwards, backwards, warmup)
    return [action for action in actions if action.microbatch_idx < num_microbatches]


def _split_backward(actions: Iterable[ActionBase], pending: int) -> list[ActionBase]:
    """Split full backward passes, and compute gradients of weights when more than `pending` of them are to be done."""
    result: list[ActionBase] = []
    weights: deque[ActionBase] = deque()
    for action in actions:
        if type(action) is not BackwardFullInputComputeAction:
            result.append(action)
            continue
        result.append(BackwardFullInputComputeAction(action.stage_idx, action.microbatch_idx, full_backward=False))
        weights.append(BackwardWeightComputeAction(action.stage_idx, action.microbatch_idx))
        if len(weights) > pending:
            result.append(weights.popleft())
    return [*result, *weights]


@final
class LoopedBFSPipelineProgramBuilder(PipelineProgramBuilder):
    """Makes programs of `looped_bfs`: GPipe with one stage per rank, and inference programs."""

    def __init__(self, num_stages_per_rank: int, inference_mode: bool = False) -> None:
        """Choose the schedule.

        Args:
            num_stages_per_rank: Number of stages that each rank hosts.
            inference_mode: Leave out backward passes.

        Raises:
            ValueError: If there is no stage.
        """
        check_sizes(num_stages_per_rank=num_stages_per_rank)
        self._num_stages_per_rank = num_stages_per_rank
        self._has_backward = not inference_mode

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""
        return self._num_stages_per_rank

    @property
    def topology_style(self) -> ScheduleStyle:
        """Stages are laid in loops."""
        return ScheduleStyle.loop

    def compose(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the program of all ranks, with sends and receives."""
        return with_communication(self.compose_compute(num_microbatches, pp_size), self)

    def compose_compute(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the compute actions of all ranks."""
        check_sizes(num_microbatches=num_microbatches, pp_size=pp_size)
        chunks, has_backward = self._num_stages_per_rank, self._has_backward
        return {r: looped_bfs(r, pp_size, num_microbatches, chunks, has_backward) for r in range(pp_size)}


@final
class Interleaved1F1BPipelineProgramBuilder(PipelineProgramBuilder):
    """Makes programs that alternate forward and backward passes.

    They come from `one_forward_one_backward` with one stage per rank, from `interleaved_1f1b` with several ones, and
    from `zero_bubble_1p` where backward passes are split.
    """

    def __init__(self, num_stages_per_rank: int, enable_zero_bubble: bool = False, lookahead: int = 1) -> None:
        """Choose the schedule.

        Args:
            num_stages_per_rank: Number of stages that each rank hosts.
            enable_zero_bubble: Split backward passes, so that gradients of weights fill bubbles.
            lookahead: Forward passes that ranks do ahead to hide transfers, see `one_forward_one_backward`. The other
                two schedules have none.

        Raises:
            ValueError: If there is no stage, or the lookahead is negative.
        """
        check_sizes(num_stages_per_rank=num_stages_per_rank)
        if lookahead < 0:
            raise ValueError(f"lookahead ({lookahead}) must not be negative.")
        self._num_stages_per_rank = num_stages_per_rank
        self._enable_zero_bubble = enable_zero_bubble
        self._lookahead = lookahead

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""
        return self._num_stages_per_rank

    @property
    def topology_style(self) -> ScheduleStyle:
        """Stages are laid in loops."""
        return ScheduleStyle.loop

    def compose(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the program of all ranks, with sends and receives."""
        return with_communication(self.compose_compute(num_microbatches, pp_size), self)

    def compose_compute(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the compute actions of all ranks."""
        check_sizes(num_microbatches=num_microbatches, pp_size=pp_size)
        return {rank: self._actions(rank, pp_size, num_microbatches) for rank in range(pp_size)}

    def _actions(self, rank: int, pp_size: int, num_microbatches: int) -> list[ActionBase]:
        if self._enable_zero_bubble:
            return zero_bubble_1p(rank, pp_size, num_microbatches, self._num_stages_per_rank)
        if self._num_stages_per_rank == 1:
            return one_forward_one_backward(rank, pp_size, num_microbatches, self._lookahead)
        return interleaved_1f1b(rank, pp_size, num_microbatches, self._num_stages_per_rank)


@final
class ForwardOnlyPipelineProgramBuilder(PipelineProgramBuilder):
    """Makes programs of the forward passes of another schedule, over the same stages on the same ranks."""

    def __init__(self, training: PipelineProgramBuilder) -> None:
        """Take the schedule that trains the stages."""
        self._training = training

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""
        return self._training.num_stages_per_rank

    @property
    def topology_style(self) -> ScheduleStyle:
        """Stages are laid as for training."""
        return self._training.topology_style

    def compose(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the program of all ranks, with sends and receives."""
        training = self._training.compose(num_microbatches, pp_size)
        forward: Program = {
            rank: [action for action in flat_actions(actions) if type(action) is ForwardComputeAction]
            for rank, actions in training.items()
        }
        return with_communication(forward, self)
