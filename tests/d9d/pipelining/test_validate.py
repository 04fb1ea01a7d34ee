"""Programs that validation refuses, the cell that it marks, and programs of all schedules and sizes that it accepts."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    Program,
    flat_actions,
    parse_program,
)
from d9d.pipelining.placement import build_stage_to_host_rank_topology
from d9d.pipelining.programs import (
    Interleaved1F1BPipelineProgramBuilder,
    LoopedBFSPipelineProgramBuilder,
    PipelineProgramBuilder,
)
from d9d.pipelining.programs_v import DualPipeVPipelineProgramBuilder, ZeroBubbleVPipelineProgramBuilder
from d9d.pipelining.validate import ProgramError, validate_program


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0\n1RECV_F0 1F0 1I0 1SEND_B0 1W0",
        "0F0 0SEND_F0\n1RECV_F0 1F0",
        "0F0 1F0 1I0 0B0 1W0",
        "0F0 0F1|0B0 0B1",
    ],
    ids=["full backward", "split backward", "forward only", "one rank", "composed"],
)
def test_complete_programs_pass(text: str):
    validate_program(parse_program(text))


@pytest.mark.parametrize(
    ("text", "marked", "problem"),
    [
        ("0F0 0SEND_F0\n1F0 1RECV_F0", ">1F0<", "its input, the output of stage 0"),
        ("1F0 0F0", ">1F0<", "neither received nor made on this rank"),
        ("0F0 0F0 0B0", ">0F0<", "forward pass has been done before"),
        ("0F0 0F1\n0F2", ">0F2<", "stage 0 is on rank 0"),
        ("0F0 1F0 0B0 1B0", ">0B0<", "its gradients, from stage 1"),
        ("0B0 0F0", ">0B0<", "forward pass has not been done before"),
        ("0F0 0B0 0B0", ">0B0<", "backward pass has been done before"),
        ("0F0 0I0 0B0 0W0", ">0B0<", "backward pass has been done before"),
        ("0F0 0F1 0B0", ">end<", "no backward pass of stage 0, microbatch 1"),
        ("0F0 1F0 0F1", ">end<", "no forward pass of stage 1, microbatch 1"),
        ("0F0 0I0", ">0I0<", "no action computes the gradients of weights"),
        ("0F0 0W0 0I0", ">0W0<", "gradients of inputs have not been computed before"),
        ("0F0 0I0 0W0 0W0", ">0W0<", "gradients of weights have been computed before"),
        ("0F0 0B0 0W0", ">0W0<", "gradients of weights have been computed before"),
        ("0SEND_F0 0F0\n1RECV_F0 1F0", ">0SEND_F0<", "has not been made before"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1SEND_B0 1B0", ">1SEND_B0<", "has not been made before"),
        ("0F0 0SEND_F0 0SEND_F0\n1RECV_F0 1F0", ">0SEND_F0<", "transfer has been done before"),
        ("0F0 0SEND_F0\n1RECV_F0 1RECV_F0 1F0", ">1RECV_F0<", "transfer has been done before"),
        ("0F0 0SEND_F0", ">0SEND_F0<", "there is no stage 1"),
        ("0F0 0SEND_F0 1F0", ">0SEND_F0<", "on the same rank"),
        ("0F0\n1RECV_F0 1F0", ">1RECV_F0<", "matching send"),
        ("0F0 0SEND_F0\n1RECV_F0 1F0 1B0 1SEND_B0", ">1SEND_B0<", "matching receive"),
        ("0F0 0SEND_F0\n1RECV_F0 1F0\n1RECV_F0", ">1RECV_F0<", "stage 1 is on rank 1"),
    ],
)
def test_broken_programs_are_refused_with_a_mark(text: str, marked: str, problem: str):
    with pytest.raises(ProgramError) as caught:
        validate_program(parse_program(text))
    message = str(caught.value)
    assert marked in message
    assert message.count(">") == 1
    assert problem in message.splitlines()[0]


def test_programs_that_block_one_another_are_refused():
    # Rank 0 sends its second microbatch while rank 1 sends the gradients of the first one.
    program = parse_program("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)
    with pytest.raises(ProgramError, match="rank 0 at 0SEND_F1, rank 1 at 1SEND_B0") as caught:
        validate_program(program)
    assert ">0SEND_F1<" in str(caught.value)


def test_grid_shows_the_neighbourhood():
    program: Program = {0: [ForwardComputeAction(0, m) for m in range(20)], 1: [ForwardComputeAction(1, 0)]}
    program[0][10] = ForwardComputeAction(0, 3)
    with pytest.raises(ProgramError) as caught:
        validate_program(program)
    _, header, rank_0, rank_1 = str(caught.value).splitlines()
    assert header.split() == [str(position) for position in range(4, 17)]
    assert " ".join(rank_0.split()) == "rank 0 0F4 0F5 0F6 0F7 0F8 0F9 >0F3< 0F11 0F12 0F13 0F14 0F15 0F16"
    assert rank_1.split() == ["rank", "1"]


def test_placement_can_be_given():
    program = parse_program("0F0 0SEND_F0\n1RECV_F0 1F0")
    validate_program(program, {0: 0, 1: 1})
    with pytest.raises(ProgramError, match="stage 0 is on rank 1"):
        validate_program(program, {0: 1, 1: 0})
    with pytest.raises(ProgramError, match=r"Ranks \[2\] host stages"):
        validate_program(program, {0: 0, 1: 1, 2: 2})


BUILDERS: dict[str, Callable[[int], PipelineProgramBuilder]] = {
    "looped_bfs": LoopedBFSPipelineProgramBuilder,
    "inference": lambda v: LoopedBFSPipelineProgramBuilder(v, inference_mode=True),
    "1f1b": Interleaved1F1BPipelineProgramBuilder,
    "classic 1f1b": lambda v: Interleaved1F1BPipelineProgramBuilder(v, lookahead=0),
    "1f1b far ahead": lambda v: Interleaved1F1BPipelineProgramBuilder(v, lookahead=3),
    "zb1p": lambda v: Interleaved1F1BPipelineProgramBuilder(v, enable_zero_bubble=True),
    "zero_bubble_v": lambda _: ZeroBubbleVPipelineProgramBuilder(),
    "dual_pipe_v": lambda _: DualPipeVPipelineProgramBuilder(),
}
# Schedules that do not depend on the number of stages per rank, or do so in other cases of this table.
ONE_CHOICE_OF_STAGES = {"classic 1f1b", "1f1b far ahead", "zero_bubble_v", "dual_pipe_v"}


def check_program(builder: PipelineProgramBuilder, num_microbatches: int, pp_size: int, has_backward: bool) -> None:
    program = builder.compose(num_microbatches, pp_size)
    num_stages = pp_size * builder.num_stages_per_rank
    validate_program(program, build_stage_to_host_rank_topology(pp_size, num_stages, builder.topology_style))
    counts = collections.Counter(type(action) for actions in program.values() for action in flat_actions(actions))
    assert counts[ForwardComputeAction] == num_stages * num_microbatches
    assert counts[BackwardFullInputComputeAction] == has_backward * num_stages * num_microbatches
    for actions in program.values():
        order = list(stages_by_last_weight_gradient(actions))
        assert order == sorted(order, reverse=True)


def stages_by_last_weight_gradient(actions: Iterable[ActionBase]) -> Iterator[int]:
    """Yield stages in the order in which their gradients are complete: gradient sync counts on the last one first."""
    last: dict[int, int] = {}
    for index, action in enumerate(flat_actions(actions)):
        match action:
            case BackwardWeightComputeAction(stage_idx=stage):
                last[stage] = index
            case BackwardFullInputComputeAction(stage_idx=stage, full_backward=True):
                last[stage] = index
            case _:
                pass
    yield from sorted(last, key=last.__getitem__)


def check_sizes(schedule: str, pp_sizes: list[int], nums_microbatches: list[int], nums_stages: list[int]) -> None:
    nums_stages = [1] if schedule in ONE_CHOICE_OF_STAGES else nums_stages
    for pp_size, num_microbatches, v in itertools.product(pp_sizes, nums_microbatches, nums_stages):
        check_program(BUILDERS[schedule](v), num_microbatches, pp_size, has_backward=schedule != "inference")


@pytest.mark.parametrize("schedule", BUILDERS)
def test_schedules_are_valid(schedule: str):
    check_sizes(schedule, pp_sizes=[1, 2, 3, 4, 7], nums_microbatches=[1, 2, 3, 5, 8, 15], nums_stages=[1, 2, 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", BUILDERS)
def test_schedules_of_all_sizes_are_valid(schedule: str):
    check_sizes(schedule, [*range(1, 9)], [*range(1, 33)], [1, 2, 3, 4])
