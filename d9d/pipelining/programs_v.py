"""Pipeline schedules whose two stages per rank form a V, so that the first rank has the last stage too. Without torch.

Each schedule is a pure function from a rank and the sizes of the pipeline to the compute actions of that rank. Chunk 0 of
a rank is its stage on the way down, chunk 1 the one on the way back.

A schedule is first written as a pattern of passes, such as ``F0 F1|B0 W1``: what is done (as in the text form of
actions) and in which chunk. Its microbatches then follow from their order, as all kinds of passes take them one by one.
Both schedules need a minimum of microbatches; fewer are handled as [Note: Any number of microbatches] says.
"""

from collections import deque
from collections.abc import Sequence
from typing import final

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ComposeAction,
    ForwardComputeAction,
    Program,
)
from d9d.pipelining.placement import ScheduleStyle
from d9d.pipelining.programs import PipelineProgramBuilder, check_sizes, with_communication

__all__ = [
    "DualPipeVPipelineProgramBuilder",
    "ZeroBubbleVPipelineProgramBuilder",
    "dual_pipe_v",
    "zero_bubble_v",
]

_NUM_CHUNKS = 2


def zero_bubble_v(rank: int, pp_size: int, num_microbatches: int) -> list[ActionBase]:
    """List the compute actions of a rank that keeps busy with gradients of weights, on two stages in a V.

    A microbatch comes back to the first rank, so its first gradients are there early. All ranks have the activations of
    `pp_size` microbatches alive, and wait for ``(pp_size - 1) / 2`` forward passes if all passes cost the same.

    Source: ZB-V in Qi et al. 2024, arXiv:2405.15362. See [Note: Any number of microbatches].
    """
    behind = pp_size - rank
    regular = max(num_microbatches, 2 * pp_size - 1)
    pattern = [
        # Fill the V: until the first microbatch is back, and then until this rank has its first gradient.
        *["F0"] * (2 * behind - 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W1"] * behind,
        # All passes of both chunks in turn, as long as there are microbatches.
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (regular - 2 * pp_size + rank + 1),
        *["I0", "W0", "F1", "I1", "W1"] * (behind - 1),
        # Empty the V: the other ranks wait for gradients of inputs, so those of weights come last.
        *["I0", "I1"] * rank,
        *["I0", "W0"] * behind,
        *["W1"] * rank,
        *["W0"] * rank,
    ]
    return _number_microbatches(pattern, rank, pp_size, num_microbatches)


def dual_pipe_v(rank: int, pp_size: int, num_microbatches: int) -> list[ActionBase]:
    """List the compute actions of a rank that overlaps forward and backward passes, on two stages in a V.

    A forward pass of one chunk and a backward pass of the other one are composed, so that one can compute while the
    other communicates inside the stage, with the experts for example. The eight steps are those of the source.

    Source: DualPipeV in github.com/deepseek-ai/DualPipe, half of the DualPipe in the DeepSeek-V3 report,
    arXiv:2412.19437, section 3.2.1. See [Note: Any number of microbatches].
    """
    behind = pp_size - rank - 1
    regular = max(num_microbatches, 2 * pp_size)
    # While the V empties, the second half of these backward passes is split.
    emptying = [f"{'B' if index <= rank else 'I'}{1 - index % 2}" for index in range(2 * (rank + 1))]
    weights = [f"W{name[1]}" for name in emptying if name[0] == "I"] + ["W0"] * behind
    overlapped = ["F0|B1", "F1|B0"] * (regular - 2 * pp_size + rank + 1)
    if behind == 0:
        # This microbatch has just turned here: the pass that would wait for the backward pass is not worth an overlap.
        overlapped[:1] = ["F0", "B1"]
    pattern = [
        *["F0"] * (2 * behind),
        *["F0", "F1"] * (rank + 1),
        *["I1", "W1", "F1"] * behind,
        *overlapped,
        *["B1", "F1|B0"] * behind,
        *emptying,
        *[name for weight in weights[:behind] for name in (weight, "I0")],
        *weights[behind:],
    ]
    return _number_microbatches(pattern, rank, pp_size, num_microbatches)


@final
class _Microbatches:
    """Gives each pass of a rank its microbatch: the next one of its kind and chunk."""

    def __init__(self, rank: int, pp_size: int) -> None:
        self._stages = (rank, _NUM_CHUNKS * pp_size - 1 - rank)
        self._num_forwards = [0] * _NUM_CHUNKS
        self._num_backwards = [0] * _NUM_CHUNKS
        self._pending_weights: tuple[deque[int], ...] = tuple(deque() for _ in range(_NUM_CHUNKS))

    def build_action(
        self, name: str
    ) -> ForwardComputeAction | BackwardFullInputComputeAction | BackwardWeightComputeAction:
        kind, chunk = name[0], int(name[1])
        stage = self._stages[chunk]
        if kind == "F":
            microbatch = self._num_forwards[chunk]
            self._num_forwards[chunk] += 1
            return ForwardComputeAction(stage, microbatch)
        if kind == "W":
            return BackwardWeightComputeAction(stage, self._pending_weights[chunk].popleft())
        microbatch = self._num_backwards[chunk]
        self._num_backwards[chunk] += 1
        if kind == "I":
            self._pending_weights[chunk].append(microbatch)
        return BackwardFullInputComputeAction(stage, microbatch, full_backward=kind == "B")


def _number_microbatches(pattern: Sequence[str], rank: int, pp_size: int, num_microbatches: int) -> list[ActionBase]:
    microbatches = _Microbatches(rank, pp_size)
    result: list[ActionBase] = []
    for entry in pattern:
        if "|" not in entry:
            action = microbatches.build_action(entry)
            if action.microbatch_idx < num_microbatches:
                result.append(action)
            continue
        actions = [microbatches.build_action(name) for name in entry.split("|")]
        existing = tuple(action for action in actions if action.microbatch_idx < num_microbatches)
        if len(existing) > 1:
            result.append(ComposeAction(existing))
        else:
            result += existing
    return result


@final
class ZeroBubbleVPipelineProgramBuilder(PipelineProgramBuilder):
    """Makes programs of `zero_bubble_v`."""

    @property
    def num_stages_per_rank(self) -> int:
        """Each rank hosts two stages."""
        return _NUM_CHUNKS

    @property
    def topology_style(self) -> ScheduleStyle:
        """Stages form a V."""
        return ScheduleStyle.v

    def compose(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the program of all ranks, with sends and receives."""
        return with_communication(self.compose_compute(num_microbatches, pp_size), self)

    def compose_compute(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the compute actions of all ranks."""
        check_sizes(num_microbatches=num_microbatches, pp_size=pp_size)
        return {rank: zero_bubble_v(rank, pp_size, num_microbatches) for rank in range(pp_size)}


@final
class DualPipeVPipelineProgramBuilder(PipelineProgramBuilder):
    """Makes programs of `dual_pipe_v`."""

    @property
    def num_stages_per_rank(self) -> int:
        """Each rank hosts two stages."""
        return _NUM_CHUNKS

    @property
    def topology_style(self) -> ScheduleStyle:
        """Stages form a V."""
        return ScheduleStyle.v

    def compose(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the program of all ranks, with sends and receives."""
        return with_communication(self.compose_compute(num_microbatches, pp_size), self)

    def compose_compute(self, num_microbatches: int, pp_size: int) -> Program:
        """Make the compute actions of all ranks."""
        check_sizes(num_microbatches=num_microbatches, pp_size=pp_size)
        return {rank: dual_pipe_v(rank, pp_size, num_microbatches) for rank in range(pp_size)}
