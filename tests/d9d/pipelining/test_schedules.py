"""Schedules by name: which builder they give, and what they refuse."""

import pytest

from d9d.pipelining.actions import Program
from d9d.pipelining.placement import ScheduleStyle
from d9d.pipelining.programs import (
    Interleaved1F1BPipelineProgramBuilder,
    LoopedBFSPipelineProgramBuilder,
    PipelineProgramBuilder,
)
from d9d.pipelining.programs_v import DualPipeVPipelineProgramBuilder, ZeroBubbleVPipelineProgramBuilder
from d9d.pipelining.schedules import SCHEDULE_NAMES, build_program_builder, schedule_problems


def program(builder: PipelineProgramBuilder) -> Program:
    return builder.compose(num_microbatches=5, pp_size=2)


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        (build_program_builder("inference"), LoopedBFSPipelineProgramBuilder(1, inference_mode=True)),
        (build_program_builder("gpipe"), LoopedBFSPipelineProgramBuilder(1)),
        (build_program_builder("looped_bfs", 3), LoopedBFSPipelineProgramBuilder(3)),
        (build_program_builder("1f1b"), Interleaved1F1BPipelineProgramBuilder(1)),
        (build_program_builder("1f1b", lookahead=0), Interleaved1F1BPipelineProgramBuilder(1, lookahead=0)),
        (build_program_builder("1f1b", lookahead=2), Interleaved1F1BPipelineProgramBuilder(1, lookahead=2)),
        (build_program_builder("1f1b", 2), Interleaved1F1BPipelineProgramBuilder(2)),
        (build_program_builder("1f1b", 2, zero_bubble=True), Interleaved1F1BPipelineProgramBuilder(2, True)),
        (build_program_builder("zero_bubble_v"), ZeroBubbleVPipelineProgramBuilder()),
        (build_program_builder("dual_pipe_v", 2), DualPipeVPipelineProgramBuilder()),
    ],
)
def test_schedules_build_their_programs(builder: PipelineProgramBuilder, expected: PipelineProgramBuilder):
    assert type(builder) is type(expected)
    assert program(builder) == program(expected)


def test_every_name_has_a_builder():
    styles = {name: build_program_builder(name).topology_style for name in SCHEDULE_NAMES}
    assert {name for name, style in styles.items() if style is ScheduleStyle.v} == {"zero_bubble_v", "dual_pipe_v"}


@pytest.mark.parametrize(
    ("schedule", "stages", "zero_bubble", "lookahead", "problems"),
    [
        ("zbv", None, False, None, ["schedule 'zbv' is not known: choose inference, gpipe, .* or dual_pipe_v"]),
        ("zero_bubble_v", 3, False, None, ["zero_bubble_v always has 2 stages per rank, not 3"]),
        ("gpipe", 2, False, None, ["gpipe always has 1 stage per rank, not 2"]),
        ("gpipe", None, True, None, ["zero bubble is an option of 1f1b only, not of gpipe"]),
        ("1f1b", 0, False, -1, [r"stages per rank \(0\) must be at least 1", r"lookahead \(-1\) must not be negative"]),
        ("1f1b", 2, False, 1, [r"lookahead \(1\) is for 1f1b with one stage per rank and no zero bubble"]),
        ("1f1b", 1, True, 1, [r"lookahead \(1\) is for 1f1b with one stage per rank and no zero bubble"]),
        ("dual_pipe_v", 4, True, 2, ["always has 2 stages", "zero bubble is an option of 1f1b", "lookahead"]),
        ("1f1b", 4, True, 0, []),
    ],
)
def test_all_problems_are_named(
    schedule: str, stages: int | None, zero_bubble: bool, lookahead: int | None, problems: list[str]
):
    found = schedule_problems(schedule, stages, zero_bubble, lookahead)
    assert len(found) == len(problems)
    if problems:
        with pytest.raises(ValueError, match=".*".join(problems)):
            build_program_builder(schedule, stages, zero_bubble, lookahead)
