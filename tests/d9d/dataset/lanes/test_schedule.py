"""Positions of steps: growing batches, steps that are jumped over, and where a run can change its mind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d.dataset.lanes import BatchSchedule, RampPoint, StepRange


def schedule(ramp=((0, 8),), skips=()) -> BatchSchedule:
    return BatchSchedule(
        ramp=tuple(RampPoint(*point) for point in ramp), skips=tuple(StepRange(*skip) for skip in skips)
    )


def walk(ramp, skips, num_steps) -> list[range]:
    """Positions of the first steps, one step at a time."""
    steps, position, size = [], 0, 0
    for step in range(num_steps):
        size = dict(ramp).get(step, size)
        position += sum((stop - start) * size for start, stop in skips if start == step)
        steps.append(range(position, position + size))
        position += size
    return steps


RAMPS = st.dictionaries(st.integers(1, 12), st.integers(1, 9), max_size=3).flatmap(
    lambda later: st.integers(1, 9).map(lambda first: ((0, first), *sorted(later.items())))
)
SKIPS = st.dictionaries(st.integers(0, 12), st.integers(1, 4), max_size=3).map(
    lambda lengths: tuple((start, start + length) for start, length in sorted(lengths.items()))
)


@given(RAMPS, SKIPS)
def test_steps_are_where_a_walk_finds_them(ramp, skips):
    built, steps = schedule(ramp, skips), walk(ramp, skips, 20)
    for step, positions in enumerate(steps):
        assert (built.start(step), built.global_batch_size(step)) == (positions.start, len(positions))
        assert built.consumed(step + 1) == positions.stop
    assert built.consumed(0) == 0


@given(RAMPS, SKIPS, st.integers(0, 20))
def test_stretches_are_the_steps_without_a_gap(ramp, skips, num_steps):
    stretches = schedule(ramp, skips).stretches(num_steps)
    steps = [range(first + i * size, first + (i + 1) * size) for first, size, count in stretches for i in range(count)]
    assert steps == walk(ramp, skips, num_steps)


@given(RAMPS, SKIPS, st.integers(0, 150))
def test_the_number_of_steps_counts_those_that_fit(ramp, skips, num_positions):
    # 150 steps of at least 1 sample reach the end in any case.
    fitting = [step for step in walk(ramp, skips, 151) if step.stop <= num_positions]
    assert schedule(ramp, skips).num_steps(num_positions) == len(fitting)


@given(RAMPS, SKIPS, RAMPS, SKIPS, st.integers(0, 14))
def test_a_resumed_schedule_is_the_old_one_before_and_the_new_one_after(ramp, skips, new_ramp, new_skips, done):
    resumed = schedule(new_ramp, new_skips).resumed_from(schedule(ramp, skips), done)
    old, new = schedule(ramp, skips), schedule(new_ramp, new_skips)
    assert [resumed.start(step) for step in range(done)] == [old.start(step) for step in range(done)]
    assert resumed.consumed(done) == old.consumed(done)
    for step in range(done, 20):
        assert resumed.global_batch_size(step) == new.global_batch_size(step)
        jump = sum(stop - start for start, stop in new_skips if start == step)
        assert resumed.start(step) == resumed.consumed(step) + jump * new.global_batch_size(step)


def test_a_skipped_range_is_read_as_if_it_had_been_done():
    plain, skipping = schedule(), schedule(skips=[(3, 5)])
    assert [skipping.start(step) for step in (2, 3, 4)] == [plain.start(step) for step in (2, 5, 6)]


def test_the_ramp_from_a_step_on():
    built = schedule([(0, 4), (10, 8), (20, 16)])
    assert [point.global_batch_size for point in built.ramp_from(0)] == [4, 8, 16]
    assert [point.global_batch_size for point in built.ramp_from(9)] == [4, 8, 16]
    assert [point.global_batch_size for point in built.ramp_from(10)] == [8, 16]
    assert [point.global_batch_size for point in built.ramp_from(99)] == [16]


def test_a_late_step_of_a_long_run_is_found_at_once():
    assert schedule([(0, 1024)]).start(10**12) == 1024 * 10**12


@pytest.mark.parametrize(
    ("ramp", "skips", "message"),
    [
        ([], [], r"ramp \(empty\) must start at step 1"),
        ([(1, 8)], [], r"ramp \(8 from step 2\) must start at step 1"),
        ([(0, 8), (5, 16), (5, 32)], [], r"\(32 from step 6\) comes after \(16 from step 6\)"),
        ([(0, 0), (5, -1)], [], r"\(0 from step 1\).*\(-1 from step 6\)"),
        ([(0, 8)], [(4, 4)], "steps 5 to 4 is not a range"),
        ([(0, 8)], [(-1, 4)], "steps 0 to 4 is not a range"),
        ([(0, 8)], [(4, 6), (4, 7)], "ask for steps 5 to 9"),
        ([(0, 8)], [(9, 10), (4, 7)], "steps 5 to 7 come after steps 10 to 10"),
        ([(0, 0)], [(4, 4)], r"global_batch_size \(0 from step 1\).*skip_steps"),
    ],
)
def test_wrong_schedules_are_refused(ramp, skips, message):
    with pytest.raises(ValueError, match=message):
        schedule(ramp, skips)


def test_there_is_no_step_before_the_first():
    with pytest.raises(IndexError, match="step -1"):
        schedule().start(-1)
