"""Timelines of small programs, worked out by hand."""

import pytest

from d9d.pipelining.actions import parse_program
from d9d.pipelining.timeline import ActionCosts, Timeline, simulate

UNIT = ActionCosts()
LINE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def rows(timeline: Timeline) -> dict[int, list[tuple[str, float, float]]]:
    return {rank: [(str(e.action), e.start, e.end) for e in events] for rank, events in timeline.events.items()}


def test_ranks_wait_for_results_of_their_neighbours():
    timeline = simulate(parse_program(LINE), UNIT)
    assert rows(timeline) == {
        0: [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        1: [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    }
    assert timeline.makespan == 9
    assert timeline.busy == {0: 6, 1: 6}
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 18)
    assert timeline.peak_activations == {0: 2, 1: 1}


def test_transfers_delay_results_between_ranks_only():
    costs = ActionCosts(transfer=10)
    # 0F0 ends at 1, 1F0 runs from 11 to 12 and 1B0 to 14, 0B0 from 24.
    two_ranks = simulate(parse_program("0F0 0B0\n1F0 1B0"), costs)
    assert rows(two_ranks)[0][-1] == ("0B0", 24, 26)
    assert simulate(parse_program("0F0 1F0 1B0 0B0"), costs).makespan == 6


def test_weight_gradients_can_wait_and_cost_on_their_own():
    costs = ActionCosts(forward=1, backward_input=2, backward_weight=4)
    timeline = simulate(parse_program("0F0 0I0 0W0\n1F0 1I0 1W0"), costs)
    assert rows(timeline) == {
        0: [("0F0", 0, 1), ("0I0", 4, 6), ("0W0", 6, 10)],
        1: [("1F0", 1, 2), ("1I0", 2, 4), ("1W0", 4, 8)],
    }


def test_parts_of_a_composed_action_wait_and_give_one_by_one():
    # 0F1 can start at once; 0B0 waits inside the composed action, while 1F1 has its input already.
    timeline = simulate(parse_program("0F0 0F1|0B0 0B1\n1F0 1B0 1F1 1B1"), UNIT)
    assert rows(timeline)[0] == [("0F0", 0, 1), ("0F1|0B0", 1, 6), ("0B1", 7, 9)]
    assert timeline.busy[0] == 6


def test_sends_and_receives_are_left_out():
    program = parse_program("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    assert simulate(program, UNIT) == simulate(parse_program("0F0 0B0\n1F0 1B0"), UNIT)


def test_measured_costs_win():
    measured = {"1F0": 5.0, "0F1|0B0": 6.0}
    costs = ActionCosts(measured=measured)
    assert rows(simulate(parse_program("0F0 0B0\n1F0 1B0"), costs))[1] == [("1F0", 1, 6), ("1B0", 6, 8)]
    # The forward pass has a third of the cost of the composed action, as it would have without a measurement.
    timeline = simulate(parse_program("0F0 0F1|0B0 0B1"), costs)
    assert rows(timeline)[0] == [("0F0", 0, 1), ("0F1|0B0", 1, 7), ("0B1", 7, 9)]


def test_peak_activations_count_stages():
    timeline = simulate(parse_program("0F0 1F0 0F1 1F1 1I0 1W0 0B0 1B1 0B1"), UNIT)
    assert timeline.peak_activations == {0: 4}
    assert timeline.peak_microbatches == {0: 2}


def test_empty_program():
    timeline = simulate({0: [], 1: []}, UNIT)
    assert (timeline.makespan, timeline.bubble_fraction, timeline.peak_activations) == (0, 0, {0: 0, 1: 0})


def test_a_program_that_cannot_go_on_names_the_blocked_action_of_each_rank():
    with pytest.raises(ValueError, match="rank 0 at 0B0, rank 1 at 1F1"):
        simulate(parse_program("0F0 0B0 0F1\n1F0 1F1 1B0"), UNIT)


def test_negative_costs_are_refused():
    with pytest.raises(ValueError, match=r"forward \(-1\)"):
        ActionCosts(forward=-1)
    with pytest.raises(ValueError, match=r"0F0 \(-2\)"):
        ActionCosts(measured={"0F0": -2})
