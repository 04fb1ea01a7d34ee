"""Schedules in loops: their programs as drawn in the papers, their makespans and activations from the papers' formulas."""

import pytest

from d9d.pipelining.actions import ForwardComputeAction, Program, flat_actions, parse_program
from d9d.pipelining.placement import (
    ScheduleStyle,
    build_stage_to_host_rank_topology,
    invert_stage_to_host_rank_topology,
)
from d9d.pipelining.programs import (
    ForwardOnlyPipelineProgramBuilder,
    Interleaved1F1BPipelineProgramBuilder,
    LoopedBFSPipelineProgramBuilder,
)
from d9d.pipelining.schedules import SCHEDULE_NAMES, build_program_builder
from d9d.pipelining.timeline import ActionCosts, simulate
from d9d.pipelining.validate import validate_program

UNIT = ActionCosts()
# Binary fractions, so that sums are exact.
UNEVEN = ActionCosts(forward=2.0, backward_input=2.5, backward_weight=1.75)
COSTS = pytest.mark.parametrize("costs", [UNIT, UNEVEN], ids=["unit", "uneven"])
# Ranks and microbatches: the formulas hold for multiples of the number of ranks.
SIZES = pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 16), (8, 32)])


def per_microbatch(costs: ActionCosts) -> float:
    return costs.forward + costs.backward_input + costs.backward_weight


def test_stages_in_loops_and_in_a_v():
    loop = build_stage_to_host_rank_topology(3, 6, ScheduleStyle.loop)
    assert loop == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    assert invert_stage_to_host_rank_topology(loop) == {0: [0, 3], 1: [1, 4], 2: [2, 5]}
    v = build_stage_to_host_rank_topology(3, 9, ScheduleStyle.v)
    assert v == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0, 6: 0, 7: 1, 8: 2}
    assert invert_stage_to_host_rank_topology(v) == {0: [0, 5, 6], 1: [1, 4, 7], 2: [2, 3, 8]}


@pytest.mark.parametrize(("p", "num_stages"), [(0, 1), (2, 0), (2, 3)])
def test_uneven_placement_is_refused(p: int, num_stages: int):
    with pytest.raises(ValueError, match=rf"num_stages \({num_stages}\).*pp_size \({p}\)"):
        build_stage_to_host_rank_topology(p, num_stages, ScheduleStyle.loop)


def test_gpipe():
    # 1B1 and 0B0 could start together, and the higher rank comes first: so 0B0 comes behind the receive of 0B1.
    assert LoopedBFSPipelineProgramBuilder(1).compose(2, 2) == parse_program("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """)


def test_looped_bfs():
    assert LoopedBFSPipelineProgramBuilder(2).compose_compute(2, 2) == parse_program("""
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)


def test_inference():
    assert LoopedBFSPipelineProgramBuilder(1, inference_mode=True).compose(2, 2) == parse_program("""
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1F0 1RECV_F1 1F1
    """)


def test_1f1b_runs_one_microbatch_ahead():
    assert Interleaved1F1BPipelineProgramBuilder(1).compose(4, 2) == parse_program("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0B0 0RECV_B1 0F3 0SEND_F3 0B1 0RECV_B2 0B2 0RECV_B3 0B3
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1RECV_F3 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3
    """)


def test_classic_1f1b():
    assert Interleaved1F1BPipelineProgramBuilder(1, lookahead=0).compose_compute(6, 4) == parse_program("""
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    """)


def test_fewer_microbatches_than_ranks():
    assert Interleaved1F1BPipelineProgramBuilder(1).compose_compute(1, 2) == parse_program("0F0 0B0\n1F0 1B0")


def test_interleaved_1f1b():
    assert Interleaved1F1BPipelineProgramBuilder(2).compose_compute(4, 2) == parse_program("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_interleaved_1f1b_drops_microbatches_that_do_not_exist():
    assert Interleaved1F1BPipelineProgramBuilder(2).compose_compute(3, 2) == parse_program("""
        0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2
    """)


def test_zero_bubble_1p():
    assert Interleaved1F1BPipelineProgramBuilder(1, enable_zero_bubble=True).compose_compute(4, 3) == parse_program("""
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """)


@COSTS
@SIZES
@pytest.mark.parametrize(
    "builder",
    [
        LoopedBFSPipelineProgramBuilder(1),
        Interleaved1F1BPipelineProgramBuilder(1, lookahead=0),
        Interleaved1F1BPipelineProgramBuilder(1, lookahead=1),
    ],
    ids=["gpipe", "classic 1f1b", "1f1b"],
)
def test_makespan_with_one_stage_per_rank(
    builder: LoopedBFSPipelineProgramBuilder | Interleaved1F1BPipelineProgramBuilder,
    p: int,
    m: int,
    costs: ActionCosts,
):
    # Huang et al. 2019, section 2.3: the bubble is p - 1 of m + p - 1 microbatches.
    assert simulate(builder.compose(m, p), costs).makespan == (m + p - 1) * per_microbatch(costs)


@COSTS
@SIZES
@pytest.mark.parametrize("v", [2, 3])
def test_makespan_of_interleaved_1f1b(v: int, p: int, m: int, costs: ActionCosts):
    # Narayanan et al. 2021, section 2.2.2: v stages divide the bubble of p - 1 microbatches through a rank by v.
    program = Interleaved1F1BPipelineProgramBuilder(v).compose(m, p)
    assert simulate(program, costs).makespan == (v * m + p - 1) * per_microbatch(costs)


@COSTS
@SIZES
@pytest.mark.parametrize("v", [2, 3])
def test_makespan_of_looped_bfs(v: int, p: int, m: int, costs: ActionCosts):
    program = LoopedBFSPipelineProgramBuilder(v).compose(m, p)
    assert simulate(program, costs).makespan == (v * m + p - 1) * per_microbatch(costs)


@COSTS
@SIZES
@pytest.mark.parametrize("v", [1, 2, 3])
def test_makespan_of_zero_bubble_1p(v: int, p: int, m: int, costs: ActionCosts):
    # Qi et al. 2023, table 1: ZB-H1 waits (p - 1) (f + i - w).
    bubble = (p - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
    program = Interleaved1F1BPipelineProgramBuilder(v, enable_zero_bubble=True).compose(m, p)
    assert simulate(program, costs).makespan == v * m * per_microbatch(costs) + bubble


def peaks(program: Program) -> list[int]:
    return list(simulate(program, UNIT).peak_activations.values())


@SIZES
def test_activations(p: int, m: int):
    ranks = range(p)
    assert peaks(LoopedBFSPipelineProgramBuilder(1).compose(m, p)) == [m] * p
    assert peaks(LoopedBFSPipelineProgramBuilder(3).compose(m, p)) == [3 * m] * p
    assert peaks(Interleaved1F1BPipelineProgramBuilder(1, lookahead=0).compose(m, p)) == [p - r for r in ranks]
    ahead = [p - r + 1 for r in ranks[:-1]]
    assert peaks(Interleaved1F1BPipelineProgramBuilder(1).compose(m, p)) == [*ahead, 1]
    interleaved = [min(p + 2 * (p - r) - 1, 2 * m) for r in ranks]
    assert peaks(Interleaved1F1BPipelineProgramBuilder(2).compose(m, p)) == interleaved
    assert peaks(Interleaved1F1BPipelineProgramBuilder(1, enable_zero_bubble=True).compose(m, p)) == [p] * p


@pytest.mark.parametrize(
    "builder",
    [LoopedBFSPipelineProgramBuilder(1), Interleaved1F1BPipelineProgramBuilder(2)],
    ids=["looped_bfs", "interleaved"],
)
def test_sizes_below_one_are_refused(builder: LoopedBFSPipelineProgramBuilder | Interleaved1F1BPipelineProgramBuilder):
    with pytest.raises(ValueError, match=r"num_microbatches \(0\)"):
        builder.compose(num_microbatches=0, pp_size=2)
    with pytest.raises(ValueError, match=r"pp_size \(-1\)"):
        builder.compose(num_microbatches=2, pp_size=-1)


def test_stages_and_lookahead_below_their_minimum_are_refused():
    with pytest.raises(ValueError, match=r"num_stages_per_rank \(0\)"):
        LoopedBFSPipelineProgramBuilder(0)
    with pytest.raises(ValueError, match=r"num_stages_per_rank \(0\)"):
        Interleaved1F1BPipelineProgramBuilder(0)
    with pytest.raises(ValueError, match=r"lookahead \(-1\)"):
        Interleaved1F1BPipelineProgramBuilder(1, lookahead=-1)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 4)])
def test_forward_passes_of_a_schedule_alone(name: str, p: int, m: int):
    training = build_program_builder(name)
    builder = ForwardOnlyPipelineProgramBuilder(training)
    program = builder.compose(m, p)
    validate_program(program)
    hosts = invert_stage_to_host_rank_topology(
        build_stage_to_host_rank_topology(p, p * training.num_stages_per_rank, training.topology_style)
    )
    for rank, actions in program.items():
        flat = list(flat_actions(actions))
        assert not any(action.has_backward_work for action in flat)
        passes = [(a.stage_idx, a.microbatch_idx) for a in flat if isinstance(a, ForwardComputeAction)]
        assert sorted(passes) == [(stage, microbatch) for stage in hosts[rank] for microbatch in range(m)]
