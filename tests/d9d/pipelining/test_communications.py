"""Where sends and receives go."""

from collections.abc import Sequence

import pytest

from d9d.pipelining.actions import ActionBase, format_program, parse_program
from d9d.pipelining.communications import add_communication_ops, post_receives_early
from d9d.pipelining.programs import (
    Interleaved1F1BPipelineProgramBuilder,
    LoopedBFSPipelineProgramBuilder,
    PipelineProgramBuilder,
)
from d9d.pipelining.programs_v import DualPipeVPipelineProgramBuilder

SEED_PROGRAM = """\
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0B0 0RECV_B1 0F3 0SEND_F3 0B1 0RECV_B2 0B2 0RECV_B3 0B3
rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1RECV_F3 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3"""


def communicating(compute: str, ranks: list[int]) -> str:
    return format_program(add_communication_ops(parse_program(compute), dict(enumerate(ranks)), len(ranks)))


def test_1f1b_line_for_line():
    compute = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert communicating(compute, [0, 1]) == SEED_PROGRAM


def test_forward_passes_only():
    assert communicating("0F0 0F1\n1F0 1F1", [0, 1]) == (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1F1"
    )


def test_neighbours_on_one_rank_transfer_nothing():
    assert communicating("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", [0, 1, 1, 0]) == (
        "rank 0: 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n"
        "rank 1: 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"
    )
    assert communicating("0F0 1F0 1B0 0B0", [0, 0]) == "rank 0: 0F0 1F0 1B0 0B0"


def test_input_gradients_are_sent_and_weight_gradients_are_not():
    assert communicating("0F0 0I0 0W0\n1F0 1I0 1W0", [0, 1]) == (
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0\nrank 1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0"
    )


def test_results_of_a_composed_action_are_sent_behind_it_in_the_order_of_its_parts():
    # Rank 1 starts the composed action when both its input and its gradients are there.
    compute = "0F0 0F1 0B0 0B1\n1F0 1F1|1B0 1B1\n2F0 2B0 2F1 2B1"
    assert communicating(compute, [0, 1, 2]) == (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1F1|1B0 1SEND_F1 1SEND_B0 1RECV_B1 1B1 1SEND_B1\n"
        "rank 2: 2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1"
    )


@pytest.mark.parametrize(
    ("compute", "ranks", "message"),
    [
        ("0B0 0F0", [0], "rank 0 at 0B0"),
        ("0F0", [0, 1], r"Ranks \[1\] host stages"),
    ],
)
def test_programs_that_cannot_run_are_refused(compute: str, ranks: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        communicating(compute, ranks)


def test_placement_names_all_stages():
    with pytest.raises(ValueError, match=r"places stages \[0\], but num_stages is 2"):
        add_communication_ops(parse_program("0F0\n1F0"), {0: 0}, num_stages=2)


# Receives posted early


def early(line: str, num_passes: int) -> str:
    return " ".join(map(str, post_receives_early(parse_program(line)[0], num_passes)))


def test_receives_overtake_as_many_passes_as_they_may():
    line = "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    assert early(line, 0) == line
    ahead = "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    assert early(line, 1) == ahead
    ahead = "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    assert early(line, 8) == ahead


def test_few_more_inputs_are_held_than_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("d9d.pipelining.communications.SPARE_INPUTS", 0)
    # Two at most, until a backward pass is done with one.
    line = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1RECV_F2 1F2 1B1 1SEND_B1 1B2 1SEND_B2"
    ahead = "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1RECV_F2 1SEND_B0 1F2 1B1 1SEND_B1 1B2 1SEND_B2"
    assert early(line, 8) == ahead


def test_gradients_are_asked_for_when_their_shape_is_known_and_in_their_order():
    line = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert early(line, 8) == "0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1"
    # Microbatch 1 runs first on this rank, and its gradients are sent last.
    line = "0F1 0SEND_F1 0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1"
    assert early(line, 8) == "0F1 0SEND_F1 0F0 0RECV_B0 0RECV_B1 0SEND_F0 0B0 0B1"


@pytest.mark.parametrize(
    "builder",
    [
        LoopedBFSPipelineProgramBuilder(2),
        Interleaved1F1BPipelineProgramBuilder(2, enable_zero_bubble=True),
        DualPipeVPipelineProgramBuilder(),
    ],
)
def test_nothing_but_receives_is_moved_and_they_keep_their_order(builder: PipelineProgramBuilder):
    for actions in builder.compose(num_microbatches=9, pp_size=4).values():
        for num_passes in (1, 4, 100):
            moved = post_receives_early(actions, num_passes)
            for kind in (True, False):
                assert of_kind(moved, is_receive=kind) == of_kind(actions, is_receive=kind)


def of_kind(actions: Sequence[ActionBase], *, is_receive: bool) -> list[ActionBase]:
    return [action for action in actions if ("RECV" in str(action)) == is_receive]
