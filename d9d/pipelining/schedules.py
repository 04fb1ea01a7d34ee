"""The schedules by name, as configs and the command line write them. Plain data, without torch."""

import dataclasses
from collections.abc import Callable

from d9d.core.module_names import did_you_mean
from d9d.pipelining.programs import (
    Interleaved1F1BPipelineProgramBuilder,
    LoopedBFSPipelineProgramBuilder,
    PipelineProgramBuilder,
)
from d9d.pipelining.programs_v import DualPipeVPipelineProgramBuilder, ZeroBubbleVPipelineProgramBuilder

__all__ = ["SCHEDULE_NAMES", "build_program_builder", "schedule_problems"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Schedule:
    """What a schedule can be given, and its builder from number of stages per rank, zero bubble and lookahead."""

    build: Callable[[int, bool, int | None], PipelineProgramBuilder]
    only_num_stages: int | None = None


_SCHEDULES = {
    "inference": _Schedule(
        build=lambda stages, _zero, _ahead: LoopedBFSPipelineProgramBuilder(stages, inference_mode=True),
        only_num_stages=1,
    ),
    "gpipe": _Schedule(build=lambda stages, _zero, _ahead: LoopedBFSPipelineProgramBuilder(stages), only_num_stages=1),
    "looped_bfs": _Schedule(build=lambda stages, _zero, _ahead: LoopedBFSPipelineProgramBuilder(stages)),
    "1f1b": _Schedule(
        build=lambda stages, zero, ahead: (
            Interleaved1F1BPipelineProgramBuilder(stages, zero)
            if ahead is None
            else Interleaved1F1BPipelineProgramBuilder(stages, zero, ahead)
        )
    ),
    "zero_bubble_v": _Schedule(
        build=lambda _stages, _zero, _ahead: ZeroBubbleVPipelineProgramBuilder(), only_num_stages=2
    ),
    "dual_pipe_v": _Schedule(build=lambda _stages, _zero, _ahead: DualPipeVPipelineProgramBuilder(), only_num_stages=2),
}

SCHEDULE_NAMES = tuple(_SCHEDULES)
"""Names of all schedules."""

_WITH_OPTIONS = "1f1b"


def schedule_problems(
    schedule: str, num_stages_per_rank: int | None, zero_bubble: bool, lookahead: int | None
) -> list[str]:
    """Say all that is wrong with the choice of a schedule; takes what `build_program_builder` takes."""
    known = _SCHEDULES.get(schedule)
    if known is None:
        valid = f"{', '.join(SCHEDULE_NAMES[:-1])} or {SCHEDULE_NAMES[-1]}"
        return [f"schedule {schedule!r} is not known: choose {valid}.{did_you_mean(schedule, SCHEDULE_NAMES)}"]
    problems: list[str] = []
    if num_stages_per_rank is not None and num_stages_per_rank < 1:
        problems.append(f"stages per rank ({num_stages_per_rank}) must be at least 1.")
    elif num_stages_per_rank is not None and num_stages_per_rank != (known.only_num_stages or num_stages_per_rank):
        problems.append(
            f"{schedule} always has {known.only_num_stages} stage{'s' * (known.only_num_stages != 1)} per rank, "
            f"not {num_stages_per_rank}."
        )
    if zero_bubble and schedule != _WITH_OPTIONS:
        problems.append(f"zero bubble is an option of {_WITH_OPTIONS} only, not of {schedule}.")
    is_classic = schedule == _WITH_OPTIONS and not zero_bubble and num_stages_per_rank in (None, 1)
    if lookahead is not None and lookahead < 0:
        problems.append(f"lookahead ({lookahead}) must not be negative.")
    elif lookahead and not is_classic:
        problems.append(f"lookahead ({lookahead}) is for {_WITH_OPTIONS} with one stage per rank and no zero bubble.")
    return problems


def build_program_builder(
    schedule: str, num_stages_per_rank: int | None = None, zero_bubble: bool = False, lookahead: int | None = None
) -> PipelineProgramBuilder:
    """Build what makes the programs of a schedule.

    Args:
        schedule: One of `SCHEDULE_NAMES`.
        num_stages_per_rank: Number of stages that each rank hosts; by default what the schedule fixes, or 1.
        zero_bubble: For ``1f1b``, compute the gradients of weights apart, in bubbles.
        lookahead: For ``1f1b`` with one stage per rank, forward passes on top of those that fill the pipeline; by
            default the builder's own. 0 is valid for every schedule.

    Raises:
        ValueError: If the schedule is not known or cannot be given these values; the message names all problems.
    """
    if problems := schedule_problems(schedule, num_stages_per_rank, zero_bubble, lookahead):
        raise ValueError(" ".join(problems))
    known = _SCHEDULES[schedule]
    return known.build(known.only_num_stages or num_stages_per_rank or 1, zero_bubble, lookahead)
