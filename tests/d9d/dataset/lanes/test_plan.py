"""Samples of steps, microbatches and ranks, in closed form."""

import itertools
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from d9d.dataset.lanes import BatchSchedule, DataPlan, Permutation, RampPoint, StepRange, Tail
from d9d.dataset.lanes.plan import divisors

WRAP, DROP, PAD, SHORT = Tail.wrap, Tail.drop, Tail.pad, Tail.short


def plan(num_samples: int, global_batch: int = 8, micro: int = 2, **changes) -> DataPlan:
    changes.setdefault("schedule", BatchSchedule.constant(global_batch))
    return DataPlan(num_samples=num_samples, microbatch_size=micro, **changes)


def rank_microbatches(built: DataPlan, step: int, dp_size: int, dp_rank: int) -> list[list[int]]:
    size = built.microbatch_size
    reads = [(start, built.order.num_read(start, size)) for start in built.microbatch_starts(step, dp_size, dp_rank)]
    return [built.order.samples(start + np.arange(num_read)).tolist() for start, num_read in reads if num_read]


def all_microbatches(built: DataPlan, step: int) -> list[list[int]]:
    """Microbatches of all ranks that are not idle."""
    return [[sample for sample in row if sample >= 0] for row in built.step_samples(step).tolist()]


def test_microbatches_of_a_step_are_divided_into_blocks():
    built = plan(16, shuffle=False)
    assert built.step_samples(0).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rank_microbatches(built, 1, 2, 0) == [[8, 9], [10, 11]]
    assert rank_microbatches(built, 1, 2, 1) == [[12, 13], [14, 15]]
    assert (built.num_microbatches(1, 2), built.num_lanes, built.valid_dp_sizes) == (2, 4, [1, 2, 4])


# 11 samples in global batches of 4, for 2 epochs.
@pytest.mark.parametrize(
    ("tail", "steps", "epoch_length", "num_padding", "num_dropped"),
    [
        (WRAP, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0], [1, 2, 3, 4], [5, 6, 7, 8]], 11, 0, 0),
        (DROP, [[0, 1, 2, 3], [4, 5, 6, 7]] * 2, 8, 0, 3),
        (PAD, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0]] * 2, 12, 1, 0),
        (SHORT, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] * 2, 12, 0, 0),
    ],
)
def test_the_end_of_an_epoch(tail, steps, epoch_length, num_padding, num_dropped):
    built = plan(11, 4, 1, tail=tail, shuffle=False, num_epochs=2)
    assert built.total_steps == len(steps)
    assert [built.step_samples(step).ravel().tolist() for step in range(len(steps))] == steps
    order = built.order
    assert (order.epoch_length, order.num_padding, order.num_dropped) == (epoch_length, num_padding, num_dropped)


# 13 = 8 + 5 samples, in microbatches of 2, 2 and 1.
@pytest.mark.parametrize(
    ("dp_size", "num_microbatches", "by_rank"),
    [
        (1, 3, [[[8, 9], [10, 11], [12]]]),
        (2, 2, [[[8, 9], [10, 11]], [[12]]]),
        (4, 1, [[[8, 9]], [[10, 11]], [[12]], []]),
    ],
)
def test_a_short_step_is_dealt_out_evenly(dp_size, num_microbatches, by_rank):
    built = plan(13, tail=SHORT, shuffle=False)
    assert [built.num_microbatches(step, dp_size) for step in (0, 1)] == [4 // dp_size, num_microbatches]
    assert [rank_microbatches(built, 1, dp_size, rank) for rank in range(dp_size)] == by_rank
    assert {len(built.microbatch_starts(1, dp_size, rank)) for rank in range(dp_size)} == {num_microbatches}
    assert built.step_samples(1).tolist() == [[8, 9], [10, 11], [12, -1]]


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 40),
    tail=st.sampled_from([PAD, SHORT]),
    skips=st.dictionaries(st.integers(0, 12), st.integers(1, 5), max_size=3),
)
def test_samples_and_short_steps_are_counted(num_samples, tail, skips):
    ranges = tuple(StepRange(start, start + length) for start, length in sorted(skips.items()))
    schedule = BatchSchedule(ramp=(RampPoint(0, 4),), skips=ranges)
    built = plan(num_samples, 4, 2, schedule=schedule, tail=tail, num_epochs=None)
    sizes = [int((built.step_samples(step) >= 0).sum()) for step in range(20)]
    for num_steps in range(21):
        assert built.num_samples_of(num_steps) == sum(sizes[:num_steps])
        assert built.num_short_steps(num_steps) == sum(size < 4 for size in sizes[:num_steps])


def test_an_epoch_of_whole_steps_has_no_short_one():
    built, other = plan(16, tail=SHORT, num_epochs=3), plan(16, tail=DROP, num_epochs=3)
    assert built.total_steps == other.total_steps == 6
    assert all((built.step_samples(step) == other.step_samples(step)).all() for step in range(6))


def test_each_lane_reads_a_chunk():
    # 19 samples, steps of 4, 2 lanes: chunks 0 to 7 and 8 to 15, and a last step with the rest.
    built = plan(19, 4, 1, tail=SHORT, num_lanes=2, is_chunked=True, shuffle=False)
    assert [all_microbatches(built, step) for step in range(5)] == [
        *([[2 * step], [2 * step + 1], [8 + 2 * step], [9 + 2 * step]] for step in range(4)),
        [[16], [17], [18]],
    ]
    assert [built.order.sample(position) for position in range(20)] == built.order.samples(np.arange(20)).tolist()


def test_padding_weighs_nothing():
    built = plan(11, 4, 1, tail=PAD, num_epochs=2)
    weights = built.order.weights(range(24))
    assert weights == ([1.0] * 11 + [0.0]) * 2
    assert plan(11, 4, 1).order.weights(range(24)) == [1.0] * 24


# (tail, steps of one epoch): the dataset is smaller than a global batch of 8.
@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_a_dataset_smaller_than_a_step(num_samples):
    padded = plan(num_samples, tail=PAD)
    assert padded.total_steps == 1
    assert sum(padded.order.weights(range(8))) == num_samples
    assert set(padded.step_samples(0).ravel().tolist()) == set(range(num_samples))
    endless = plan(num_samples, num_epochs=None)
    assert endless.total_steps is None
    counts = Counter(sample for step in range(num_samples) for sample in endless.step_samples(step).ravel().tolist())
    assert counts == dict.fromkeys(range(num_samples), 8)  # 8 epochs in num_samples steps
    for tail, message in ((DROP, "fewer than one global batch"), (WRAP, "do not fill one global batch")):
        with pytest.raises(ValueError, match=message):
            plan(num_samples, tail=tail)


def test_a_shuffled_epoch_follows_the_permutation_of_its_number():
    built = plan(13, 4, 2, num_epochs=3, seed=5)
    orders = [[Permutation(13, 5, epoch)[i] for i in range(13)] for epoch in range(3)]
    expected = list(itertools.chain(*orders))
    read = [sample for step in range(9) for sample in built.step_samples(step).ravel().tolist()]
    assert read == expected[:36]
    assert [built.order.sample(position) for position in range(39)] == expected
    assert built.total_steps == 9


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 97),
    micro=st.integers(1, 4),
    num_micro=st.integers(1, 12),
    tail=st.sampled_from(Tail),
    shuffle=st.booleans(),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    is_chunked=st.booleans(),
    data=st.data(),
)
def test_every_sample_once_per_epoch_and_the_same_on_any_number_of_ranks(
    num_samples, micro, num_micro, tail, shuffle, num_epochs, seed, is_chunked, data
):
    size = micro * num_micro
    assume(num_samples >= size or tail in (PAD, SHORT))
    options = {
        "shuffle": shuffle,
        "num_epochs": num_epochs,
        "seed": seed,
        "is_chunked": is_chunked and tail is not WRAP,
        "num_lanes": data.draw(st.sampled_from([0, *divisors(num_micro)])),
    }
    built = plan(num_samples, size, micro, tail=tail, **options)
    steps = range(built.total_steps)
    whole = [all_microbatches(built, step) for step in steps]
    positions = range(len(whole) * size)
    weights = np.array(built.order.weights(positions))
    samples = np.array([(list(itertools.chain(*step)) + [-1] * size)[:size] for step in whole]).ravel()
    length = built.order.epoch_length
    for epoch in range(num_epochs):
        in_epoch = slice(epoch * length, (epoch + 1) * length)
        counted = Counter(samples[in_epoch][weights[in_epoch] == 1].tolist())
        is_whole = (epoch + 1) * length <= len(positions)
        assert set(counted.values()) == {1} or not counted
        if tail is not DROP and is_whole:
            assert len(counted) == num_samples
    # What is left out: at the end of the run for `wrap`, at the end of each epoch for `drop`.
    num_left_out = {WRAP: num_samples * num_epochs % size, DROP: num_samples % size * num_epochs, PAD: 0, SHORT: 0}[
        tail
    ]
    assert weights.sum() == num_samples * num_epochs - num_left_out
    for dp_size in built.valid_dp_sizes:
        for step in steps:
            by_rank = [rank_microbatches(built, step, dp_size, rank) for rank in range(dp_size)]
            assert list(itertools.chain(*by_rank)) == whole[step]


def test_ramped_steps_follow_each_other_without_gap():
    built = plan(100, schedule=BatchSchedule(ramp=(RampPoint(0, 4), RampPoint(3, 12))), shuffle=False)
    read = [sample for step in range(built.total_steps) for sample in built.step_samples(step).ravel().tolist()]
    # 3 * 4 + 7 * 12 = 96, and another 12 do not fit.
    assert read == list(range(96))
    # 2 and 6 microbatches per step: their greatest common divisor.
    assert (built.num_lanes, built.valid_dp_sizes) == (2, [1, 2])


def test_skipped_steps_are_not_read():
    built = plan(64, schedule=BatchSchedule(ramp=(RampPoint(0, 8),), skips=(StepRange(2, 5),)), shuffle=False)
    assert built.total_steps == 5
    assert [built.step_samples(step)[0, 0] for step in range(5)] == [0, 8, 40, 48, 56]


def test_the_past_of_a_resumed_run_need_not_fit():
    built = plan(100, 8, 4).resumed_from(BatchSchedule.constant(6), num_steps=2)
    assert built.schedule.start(2) == 12
    assert built.total_steps == 2 + (100 - 12) // 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_chunked": True}, "chunks need epochs that end with a step"),
        ({"num_samples": 0}, r"num_samples \(0\)"),
        ({"micro": 0}, r"microbatch_size \(0\)"),
        ({"num_samples": 0, "num_epochs": 0, "seed": -1}, r"num_samples \(0\).*num_epochs \(0\).*seed \(-1\)"),
        ({"seed": 2**63}, "seed"),
        ({"micro": 3}, r"global_batch_size \(8\) is not a multiple of microbatch_size \(3\)\. Use 6 or 9"),
        ({"micro": 9}, r"microbatch_size \(9\)\. Use 9\."),
        ({"num_lanes": 3}, r"lanes \(3\) does not divide the 4 microbatches per step.*Use one of 1, 2, 4"),
        (
            {"micro": 1, "num_lanes": 8, "schedule": BatchSchedule(ramp=(RampPoint(0, 8), RampPoint(7, 12)))},
            r"12 microbatches per step from step 8",
        ),
        (
            {"tail": DROP, "micro": 3, "schedule": BatchSchedule(ramp=(RampPoint(0, 8), RampPoint(7, 12)))},
            r"\(8\) from step 1 is not a multiple.*needs tail 'wrap', not 'drop'",
        ),
        ({"num_samples": 7, "tail": DROP}, "7 samples, fewer than one global batch"),
        (
            {"schedule": BatchSchedule(ramp=(RampPoint(0, 8),), skips=(StepRange(0, 12),))},
            "1 ranges to skip",
        ),
    ],
)
def test_wrong_plans_are_refused_with_all_problems(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"num_samples": 100, **changes})


def test_ranks_that_do_not_divide_the_lanes_are_refused():
    built = plan(100, 24, 2, num_lanes=6)
    with pytest.raises(
        ValueError, match=r"size \(4\) does not divide the number of lanes \(6\)\. Use one of 1, 2, 3, 6"
    ):
        built.microbatch_starts(0, 4, 0)
    with pytest.raises(ValueError, match=r"dp_rank \(2\) must be from 0 to 1"):
        built.microbatch_starts(0, 2, 2)
    assert [built.dp_problems(size) != [] for size in (0, 1, 2, 3, 4, 5, 6, 12)] == [
        size not in (1, 2, 3, 6) for size in (0, 1, 2, 3, 4, 5, 6, 12)
    ]


def test_many_valid_sizes_are_listed_in_part():
    (problem,) = plan(10**6, 5040, 1).dp_problems(11)
    # 5040 has 60 divisors.
    assert problem.endswith("1680, 2520, 5040, and 48 smaller ones.")


@given(st.integers(1, 2000))
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_billion_samples_start_at_once_in_little_memory():
    tracemalloc.start()
    start = time.perf_counter()
    built = plan(10**9, 4096, 4, num_epochs=10)
    samples = built.step_samples(2_000_000)
    duration_s = time.perf_counter() - start
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert built.total_steps == 10**10 // 4096
    assert len(np.unique(samples)) == 4096
    assert duration_s < 1
    assert peak_bytes < 2**21
