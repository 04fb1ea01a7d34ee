"""Schedules in a V: their programs worked out from the sources, their makespans and activations from formulas."""

import pytest

from d9d.pipelining.actions import parse_program
from d9d.pipelining.placement import ScheduleStyle
from d9d.pipelining.programs_v import DualPipeVPipelineProgramBuilder, ZeroBubbleVPipelineProgramBuilder
from d9d.pipelining.timeline import ActionCosts, simulate

UNIT = ActionCosts()
SIZES = pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (4, 16), (8, 32)])


def test_zero_bubble_v():
    assert ZeroBubbleVPipelineProgramBuilder().compose_compute(4, 2) == parse_program("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """)


def test_dual_pipe_v():
    assert DualPipeVPipelineProgramBuilder().compose_compute(4, 2) == parse_program("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3|3B1 3F2|0B0 3B2 3F3|0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2|1B0 1F3|2B1 2F3|1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """)


def test_one_microbatch():
    assert ZeroBubbleVPipelineProgramBuilder().compose(1, 2) == parse_program("""
        0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0
        1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0
    """)
    assert DualPipeVPipelineProgramBuilder().compose_compute(1, 2) == parse_program("""
        0F0 3F0 3I0 3W0 0B0
        1F0 2F0 2B0 1B0
    """)


def test_stages_form_a_v():
    for builder in (ZeroBubbleVPipelineProgramBuilder(), DualPipeVPipelineProgramBuilder()):
        assert (builder.num_stages_per_rank, builder.topology_style) == (2, ScheduleStyle.v)


@SIZES
def test_makespan_of_zero_bubble_v(p: int, m: int):
    # With passes of equal cost, the handcrafted schedule of Qi et al. 2024 waits p - 1 forward passes of a stage.
    program = ZeroBubbleVPipelineProgramBuilder().compose(m, p)
    assert simulate(program, UNIT).makespan == 2 * m * 3 + (p - 1)


@SIZES
def test_makespan_of_dual_pipe_v(p: int, m: int):
    # The README of DualPipe: (p - 1) (f&b + b - 3 w), where f&b is an overlapped pair and b a full backward pass. It
    # lets a pair wait and give its results as a whole; a timeline lets its parts do so, and has to wait for less.
    pair, backward, weight = 3, 2, 1
    bubble = (p - 1) * (pair + backward - 3 * weight)
    program = DualPipeVPipelineProgramBuilder().compose(m, p)
    assert 2 * m * 3 <= simulate(program, UNIT).makespan <= 2 * m * 3 + bubble


@SIZES
def test_activations(p: int, m: int):
    # As many as 2 p stages of a 1F1B pipeline have, on each rank; DualPipeV has at most one more.
    zero_bubble = simulate(ZeroBubbleVPipelineProgramBuilder().compose(m, p), UNIT)
    assert list(zero_bubble.peak_activations.values()) == [2 * p] * p
    dual_pipe = simulate(DualPipeVPipelineProgramBuilder().compose(m, p), UNIT)
    assert max(dual_pipe.peak_activations.values()) <= 2 * p + 1


@pytest.mark.parametrize("builder", [ZeroBubbleVPipelineProgramBuilder(), DualPipeVPipelineProgramBuilder()])
def test_sizes_below_one_are_refused(builder: ZeroBubbleVPipelineProgramBuilder | DualPipeVPipelineProgramBuilder):
    with pytest.raises(ValueError, match=r"num_microbatches \(0\)"):
        builder.compose(num_microbatches=0, pp_size=2)
    with pytest.raises(ValueError, match=r"pp_size \(0\)"):
        builder.compose(num_microbatches=2, pp_size=0)
