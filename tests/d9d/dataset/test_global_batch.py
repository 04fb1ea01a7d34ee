"""Samples of a step, and their parts on each rank."""

import itertools

import pytest

from d9d.dataset import ShardIndexingMode
from d9d.dataset.global_batch import EpochOrder, GlobalBatchPlan

SEQUENTIAL, CHUNKED = ShardIndexingMode.sequential, ShardIndexingMode.chunked


def plans(num_samples: int, dp_size: int, *, mode=SEQUENTIAL, drop_last=True, global_batch=8, micro=2):
    return [
        GlobalBatchPlan(
            num_samples=num_samples,
            global_batch_size=global_batch,
            microbatch_size=micro,
            dp_size=dp_size,
            dp_rank=dp_rank,
            mode=mode,
            drop_last=drop_last,
        )
        for dp_rank in range(dp_size)
    ]


def step_of(ranks: list[GlobalBatchPlan], step: int) -> list[int]:
    return sorted(itertools.chain.from_iterable(mb for plan in ranks for mb in plan.microbatches(step)))


def test_microbatches_are_dealt_out_in_turn():
    rank_0, rank_1 = plans(16, 2)
    assert rank_0.microbatches(0) == [[0, 1], [4, 5]]
    assert rank_1.microbatches(0) == [[2, 3], [6, 7]]
    assert rank_1.microbatches(1) == [[10, 11], [14, 15]]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_a_step_holds_the_same_samples_for_any_number_of_ranks(dp_size):
    ranks = plans(27, dp_size)
    assert [step_of(ranks, step) for step in range(3)] == [list(range(s * 8, s * 8 + 8)) for s in range(3)]
    assert ranks[0].steps_per_epoch == 3


@pytest.mark.parametrize("mode", [SEQUENTIAL, CHUNKED])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [5, 8, 9, 13, 23, 24, 25, 31])
def test_without_drop_last_an_epoch_misses_nothing(num_samples, dp_size, mode):
    ranks = plans(num_samples, dp_size, mode=mode, drop_last=False)
    steps = range(ranks[0].steps_per_epoch)
    seen = [sample for step in steps for sample in step_of(ranks, step)]
    # Filled up to a multiple of the ranks, and no further.
    assert len(seen) == -(-num_samples // dp_size) * dp_size
    assert set(seen) == set(range(num_samples))
    assert ranks[0].steps_per_epoch == -(-num_samples // 8)


@pytest.mark.parametrize("mode", [SEQUENTIAL, CHUNKED])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", [8, 9, 23, 25])
def test_ranks_run_the_same_number_of_microbatches(num_samples, drop_last, mode):
    ranks = plans(num_samples, 4, mode=mode, drop_last=drop_last)
    for step in range(ranks[0].steps_per_epoch):
        counts = {len(plan.microbatches(step)) for plan in ranks}
        assert counts == {ranks[0].num_microbatches(step)}


def test_chunked_ranks_read_neighbours():
    rank_0, rank_1 = plans(18, 2, mode=CHUNKED)
    assert [rank_0.microbatches(step) for step in range(2)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [rank_1.microbatches(step) for step in range(2)] == [[[9, 10], [11, 12]], [[13, 14], [15, 16]]]


def test_the_last_step_is_filled_up_from_the_start():
    rank_0, rank_1 = plans(11, 2, drop_last=False)
    # 3 samples are left for 2 ranks: 2 each, one of them the first of the epoch again.
    assert (rank_0.microbatches(1), rank_1.microbatches(1)) == ([[8, 9]], [[10, 0]])


def test_only_chunked_positions_depend_on_the_number_of_ranks():
    assert plans(16, 1)[0].identity() == plans(16, 4)[3].identity()
    assert plans(16, 1, mode=CHUNKED)[0].identity() != plans(16, 4, mode=CHUNKED)[0].identity()


def test_a_shuffled_epoch_is_a_permutation_that_follows_from_seed_and_epoch():
    positions = list(range(50))
    first = EpochOrder(50, shuffle=True, seed=3)
    epoch_0, epoch_1 = first.samples(0, positions), first.samples(1, positions)
    assert sorted(epoch_0) == sorted(epoch_1) == positions
    assert epoch_0 != epoch_1
    assert EpochOrder(50, shuffle=True, seed=3).samples(1, positions) == epoch_1
    assert EpochOrder(50, shuffle=True, seed=4).samples(1, positions) != epoch_1


def test_without_shuffle_positions_are_samples():
    assert EpochOrder(5, shuffle=False, seed=0).samples(3, [4, 0]) == [4, 0]
