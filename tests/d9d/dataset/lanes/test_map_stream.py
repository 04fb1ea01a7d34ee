"""The elastic stream: the same microbatches on any number of ranks, workers and resumes; errors; random numbers."""

import concurrent.futures
import functools
import gc
import itertools
import json
import os
import pickle
import random
import signal
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import IdleMicrobatch
from d9d.dataset.lanes import (
    BatchSchedule,
    DataPlan,
    ElasticMapStream,
    LoaderOptions,
    RampPoint,
    SampleError,
    StepRange,
    Tail,
    add_weights,
)
from d9d.dataset.lanes.plan import divisors
from d9d.dataset.pack_stream import has_rank_invariant_state


class Numbers:
    """Sample i is i; counts how many were loaded."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_loaded = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        self.num_loaded += 1
        return index


class Noise(Numbers):
    """Draws from every global generator."""

    def __getitem__(self, index: int):
        return (index, torch.rand(()).item(), np.random.rand(), random.random())


class OwnNoise(Numbers):
    """Draws from a generator of its own."""

    def getitem_seeded(self, index: int, seed: int):
        return (index, random.Random(seed).random())


class Failing(Numbers):
    def __init__(self, num_samples: int, error: Exception) -> None:
        super().__init__(num_samples)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error
        return index


class Dying(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Hanging(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            time.sleep(2)
        return index


def plan(num_samples: int = 24, global_batch: int = 8, micro: int = 2, **changes) -> DataPlan:
    changes.setdefault("schedule", BatchSchedule.constant(global_batch))
    return DataPlan(num_samples=num_samples, microbatch_size=micro, **changes)


def stream(built: DataPlan, dataset=None, *, dp_size=1, dp_rank=0, workers=0, collate=list, **changes):
    dataset = Numbers(built.num_samples) if dataset is None else dataset
    if built.tail is Tail.pad and "attach_weights" not in changes:
        collate, changes["attach_weights"] = samples_by_name, add_weights
    loader = LoaderOptions(num_workers=workers)
    return ElasticMapStream(dataset, collate, built, dp_size=dp_size, dp_rank=dp_rank, **{"loader": loader, **changes})


def samples_by_name(samples: list) -> dict:
    return {"samples": samples}


def take(packs: MicrobatchPackStream, count: int) -> list:
    return list(itertools.islice(packs, count))


def over_ranks(built: DataPlan, dp_size: int, state=None, **changes) -> list[list]:
    """All microbatches of each step, rank after rank."""
    ranks = [stream(built, dp_size=dp_size, dp_rank=rank, **changes) for rank in range(dp_size)]
    for packs in ranks:
        if state is not None:
            packs.load_state_dict(state)
    return [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def busy(step: list) -> list:
    return [microbatch for microbatch in step if not isinstance(microbatch, IdleMicrobatch)]


def expected(built: DataPlan, first: int = 0) -> list[list]:
    steps = [built.step_samples(step).tolist() for step in range(first, built.total_steps)]
    return [[[sample for sample in microbatch if sample >= 0] for microbatch in step] for step in steps]


def test_a_stream_says_what_the_loop_asks():
    packs = stream(plan(num_epochs=2))
    assert isinstance(packs, MicrobatchPackStream)
    assert (packs.total_steps, packs.num_samples_of(5), has_rank_invariant_state(packs)) == (6, 40, True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_microbatches_do_not_depend_on_ranks_or_workers(dp_size, workers):
    built = plan(29, num_epochs=2)
    assert over_ranks(built, dp_size, workers=workers) == expected(built)


@pytest.mark.parametrize("tail", [Tail.wrap, Tail.drop, Tail.short])
def test_a_state_saved_after_every_step_leads_to_the_same_rest(tail):
    # Epochs of 3.25 steps: positions cross them in every possible way.
    built = plan(26, num_epochs=4, tail=tail)
    whole = list(stream(built))
    saving = stream(built)
    states = [saving.state_dict(), *(saving.state_dict() for _ in saving)]
    assert len(states) == built.total_steps + 1
    for done, state in enumerate(states):
        resumed = stream(built)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert list(resumed) == whole[done:]
        assert resumed.state_dict() == states[-1]


def test_a_padded_evaluation_resumes_with_its_weights():
    built = plan(21, tail=Tail.pad, num_epochs=2)

    def plain(packs) -> list:
        return [[(m["samples"], m["sample_weight"].tolist()) for m in pack] for pack in packs]

    whole = plain(stream(built))
    for done in range(len(whole) + 1):
        saved, resumed = stream(built), stream(built)
        take(saved, done)
        resumed.load_state_dict(saved.state_dict())
        assert plain(resumed) == whole[done:]


def test_every_change_of_ranks_at_every_step_leads_to_the_same_rest():
    built = plan(29, 12, 1, num_epochs=2)
    sizes = built.valid_dp_sizes
    assert sizes == [1, 2, 3, 4, 6, 12]
    steps = expected(built)
    for before, after in itertools.product(sizes, sizes):
        for done in range(len(steps) + 1):
            saved = stream(built, dp_size=before, dp_rank=before - 1)
            take(saved, done)
            assert over_ranks(built, after, saved.state_dict()) == steps[done:]


def check_any_run(num_samples, micro, num_micro, tail, num_epochs, data, workers):
    """Run with some lanes on some ranks to some step, and go on with other ones."""
    size = micro * num_micro
    assume(num_samples >= size or tail is not Tail.drop)
    assume(num_samples * num_epochs >= size or tail is Tail.short)
    lanes = st.sampled_from([0, *divisors(num_micro)])
    built, later = (
        plan(num_samples, size, micro, tail=tail, num_epochs=num_epochs, num_lanes=data.draw(lanes)) for _ in range(2)
    )
    before, after = (data.draw(st.sampled_from(each.valid_dp_sizes)) for each in (built, later))
    done = data.draw(st.integers(0, built.total_steps))
    ranks = [stream(built, dp_size=before, dp_rank=rank, workers=data.draw(workers)) for rank in range(before)]
    first = [list(itertools.chain(*step)) for step in zip(*(take(packs, done) for packs in ranks), strict=True)]
    states = [packs.state_dict() for packs in ranks]
    assert all(state == states[0] for state in states)
    rest = over_ranks(later, after, states[0], workers=data.draw(workers))
    assert list(map(busy, first + rest)) == expected(built)


ANY_RUN = {
    "num_samples": st.integers(1, 60),
    "micro": st.integers(1, 3),
    "num_micro": st.integers(1, 6),
    "tail": st.sampled_from([Tail.wrap, Tail.drop, Tail.short]),
    "num_epochs": st.integers(1, 3),
    "data": st.data(),
}


@settings(max_examples=40, deadline=None)
@given(**ANY_RUN)
def test_any_run_can_stop_anywhere_and_go_on_anyhow(num_samples, micro, num_micro, tail, num_epochs, data):
    check_any_run(num_samples, micro, num_micro, tail, num_epochs, data, workers=st.just(0))


@pytest.mark.parametrize(
    "max_examples", [4, pytest.param(60, marks=pytest.mark.exhaustive)], ids=["quick", "exhaustive"]
)
def test_any_run_can_go_on_with_any_number_of_workers(max_examples):
    @settings(max_examples=max_examples, deadline=None)
    @given(**{**ANY_RUN, "num_micro": st.integers(1, 2)})
    def check(num_samples, micro, num_micro, tail, num_epochs, data):
        check_any_run(num_samples, micro, num_micro, tail, num_epochs, data, workers=st.integers(0, 2))

    check()


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_read_ahead_does_not_count(persistent):
    built = plan(80)
    loader = LoaderOptions(num_workers=2, prefetch_factor=4, persistent_workers=persistent)
    packs = stream(built, loader=loader)
    first = take(packs, 2)
    state = packs.state_dict()
    assert (state["num_steps"], state["consumed"]) == (2, 16)
    # The same stream goes on, and so does another one.
    other = stream(built, loader=loader)
    other.load_state_dict(state)
    assert first + list(packs) == first + list(other) == expected_packs(built)


def expected_packs(built: DataPlan) -> list:
    return [tuple(step) for step in expected(built)]


def test_workers_that_stay_end_with_the_stream():
    packs = stream(plan(), loader=LoaderOptions(num_workers=1, persistent_workers=True))
    take(packs, 1)
    start = time.perf_counter()
    del packs
    gc.collect()
    # If it takes longer, workers were not told to end, and PyTorch has waited 5 seconds before it killed them.
    assert time.perf_counter() - start < 4


def test_moving_loads_nothing():
    dataset = Numbers(8_000_000)
    built = plan(8_000_000)
    packs = stream(built, dataset)
    packs.load_state_dict({**packs.state_dict(), "num_steps": 999_999, "consumed": 7_999_992})
    (last,) = packs
    assert list(last) == built.step_samples(999_999).tolist()
    assert dataset.num_loaded == 8


def test_a_billion_samples_give_a_first_pack_in_no_time():
    list(stream(plan()))  # what is imported and cached once does not count
    tracemalloc.start()
    start = time.perf_counter()
    (first,) = take(stream(plan(10**9, 1024, 8)), 1)
    duration_s = time.perf_counter() - start
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) == 128
    assert duration_s < 1
    assert peak_bytes < 2 * 2**20


def test_a_stream_at_its_end_stays_there():
    packs = stream(plan())
    assert len(list(packs)) == 3
    assert list(packs) == []
    assert list(over_ranks(plan(), 2, packs.state_dict())) == []


def test_without_end_the_stream_goes_on():
    built = plan(num_epochs=None)
    packs = stream(built)
    assert packs.total_steps is None
    assert list(take(packs, 100)[99]) == built.step_samples(99).tolist()


def test_an_iterator_that_was_overtaken_is_stale():
    packs = stream(plan())
    state = packs.state_dict()
    old = iter(packs)
    next(old)
    packs.load_state_dict(state)
    with pytest.raises(RuntimeError, match="stale"):
        next(old)
    assert packs.state_dict() == state
    old, new = iter(packs), iter(packs)
    next(old)
    next(new)
    with pytest.raises(RuntimeError, match="stale"):
        next(old)


# -- changes at a resume


def test_the_global_batch_may_change_at_a_resume():
    before = stream(plan(100, 8, shuffle=False))
    take(before, 3)
    built = plan(100, 20, shuffle=False)
    after = stream(built)
    after.load_state_dict(before.state_dict())
    assert after.total_steps == 3 + (100 - 24) // 20
    assert [pack[0][0] for pack in after] == [24, 44, 64]
    # And again, with the history of both.
    third = stream(plan(100, 4, shuffle=False))
    third.load_state_dict(after.state_dict())
    assert [pack[0][0] for pack in third] == [84, 88, 92, 96]


def test_the_microbatch_may_change_at_a_resume():
    before = stream(plan(40, 8, 4))
    take(before, 2)
    resumed = over_ranks(plan(40, 8, 1), 8, before.state_dict())
    assert [list(itertools.chain(*step)) for step in resumed] == [
        list(itertools.chain(*step)) for step in expected(plan(40, 8, 1), 2)
    ]


def test_a_loss_spike_is_jumped_over():
    before = stream(plan(80, shuffle=False))
    take(before, 3)
    skipping = BatchSchedule(ramp=(RampPoint(0, 8),), skips=(StepRange(4, 6),))
    after = stream(plan(80, schedule=skipping, shuffle=False))
    after.load_state_dict(before.state_dict())
    assert [pack[0][0] for pack in take(after, 3)] == [24, 48, 56]
    # The jump stays part of the position when it is no longer configured.
    last = stream(plan(80, shuffle=False))
    last.load_state_dict(after.state_dict())
    assert [pack[0][0] for pack in last] == [64, 72]


def test_a_ramp_works_over_ranks():
    built = plan(60, schedule=BatchSchedule(ramp=(RampPoint(0, 4), RampPoint(2, 12))))
    assert over_ranks(built, 2) == expected(built)
    packs = stream(built)
    assert [packs.num_samples_of(num_steps) for num_steps in range(5)] == [0, 4, 8, 20, 32]
    # A run that was resumed with another batch size counts what it has read.
    resumed = stream(plan(60, schedule=BatchSchedule.constant(6)))
    take(packs, 3)
    resumed.load_state_dict(packs.state_dict())
    assert [resumed.num_samples_of(num_steps) for num_steps in (3, 4)] == [20, 26]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (plan(25), r"num_samples \(checkpoint: 24, now: 25\)"),
        (plan(seed=1), r"seed \(checkpoint: 0, now: 1\)"),
        (plan(tail=Tail.drop), r"tail \(checkpoint: wrap, now: drop\)"),
    ],
)
def test_other_data_is_refused_and_nothing_moves(own, message):
    saved = stream(plan())
    take(saved, 1)
    packs = stream(own)
    with pytest.raises(ValueError, match=message):
        packs.load_state_dict(saved.state_dict())
    assert packs.state_dict()["num_steps"] == 0


def test_another_fingerprint_is_refused():
    saved = stream(plan(), fingerprint="one").state_dict()
    with pytest.raises(ValueError, match=r"fingerprint \(checkpoint: one, now: two\)"):
        stream(plan(), fingerprint="two").load_state_dict(saved)
    stream(plan()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 3}, r"data-parallel size \(3\) does not divide the number of lanes \(4\)\. Use one of 1, 2, 4"),
        ({"dp_rank": 1}, r"dp_rank \(1\) must be from 0 to 0"),
        ({"dataset": Numbers(9)}, "9 samples, but the plan is for 24"),
        ({"built": plan(tail=Tail.pad), "attach_weights": None}, "attach_weights"),
        ({"dp_size": 0, "dataset": Numbers(9)}, r"\(0\) does not divide.*9 samples"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        stream(**{"built": plan(), **changes})


def test_a_dataset_with_a_state_keeps_it():
    class Counting(Numbers):
        version = 0

        def state_dict(self):
            return {"version": self.version}

        def load_state_dict(self, state_dict):
            self.version = state_dict["version"]

    dataset = Counting(24)
    dataset.version = 7
    state = stream(plan(), dataset).state_dict()
    assert state["dataset"] == {"version": 7}
    other = Counting(24)
    stream(plan(), other).load_state_dict(state)
    assert other.version == 7


def test_a_dataset_with_a_state_is_loaded_once_where_it_draws():
    class Advancing(Noise):
        def __getitem__(self, index: int):
            self.num_loaded += 1
            return super().__getitem__(index)

        def state_dict(self):
            return {"num_loaded": self.num_loaded}

        def load_state_dict(self, state_dict):
            self.num_loaded = state_dict["num_loaded"]

    dataset, stateless = Advancing(24), Noise(24)
    (pack,) = itertools.islice(stream(plan(), dataset), 1)
    (expected,) = itertools.islice(stream(plan(), stateless), 1)
    assert pack == expected
    assert dataset.num_loaded == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1, "timeout_s": -2.0}, r"num_workers \(-1\).*timeout_s \(-2.0\)"),
        ({"num_workers": 1, "prefetch_factor": 0}, r"prefetch_factor \(0\) must be at least 1"),
        (
            {"persistent_workers": True, "prefetch_factor": 2, "timeout_s": 1.0, "start_method": "spawn"},
            r"persistent_workers \(True\) needs.*prefetch_factor \(2\) needs.*timeout_s.*start_method \(spawn\)",
        ),
    ],
)
def test_loader_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoaderOptions(**options)


# -- padding


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_padding_weighs_nothing_on_any_number_of_ranks(dp_size):
    built = plan(21, tail=Tail.pad, shuffle=True)
    steps = over_ranks(built, dp_size)
    assert len(steps) == 3
    pairs = [
        (sample, weight)
        for microbatch in itertools.chain(*steps)
        for sample, weight in zip(microbatch["samples"], microbatch["sample_weight"].tolist(), strict=True)
    ]
    assert [weight for _, weight in pairs] == [1.0] * 21 + [0.0] * 3
    assert sorted(sample for sample, weight in pairs if weight) == list(range(21))
    assert steps[0][0]["sample_weight"].dtype is torch.float32


def test_weights_go_under_the_name_that_is_asked_for():
    attach = functools.partial(add_weights, key="w")
    ((microbatch,),) = stream(plan(1, 2, tail=Tail.pad), collate=samples_by_name, attach_weights=attach)
    assert (microbatch["samples"], microbatch["w"].tolist()) == ([0, 0], [1.0, 0.0])


# -- a short last step


def test_a_short_step_gives_every_rank_as_many_microbatches():
    # 13 samples in steps of 8: the second has 5, in microbatches of 2, 2 and 1.
    built = plan(13, tail=Tail.short, shuffle=False)
    packs = {
        dp_size: [list(stream(built, dp_size=dp_size, dp_rank=r))[1] for r in range(dp_size)] for dp_size in (1, 2, 4)
    }
    assert packs[1] == [([8, 9], [10, 11], [12])]
    assert packs[2] == [([8, 9], [10, 11]), ([12], IdleMicrobatch([12]))]
    assert packs[4] == [([8, 9],), ([10, 11],), ([12],), (IdleMicrobatch([12]),)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_samples", [1, 2, 9, 11, 16, 17])
def test_a_short_step_reads_each_sample_once_on_any_number_of_ranks(num_samples, workers):
    built = plan(num_samples, 8, 2, tail=Tail.short, num_epochs=2)
    for dp_size in (1, 2, 4):
        steps = over_ranks(built, dp_size, workers=workers)
        assert list(map(busy, steps)) == expected(built)
        half = len(steps) // 2
        for epoch in (steps[:half], steps[half:]):
            read = [sample for step in epoch for microbatch in busy(step) for sample in microbatch]
            assert sorted(read) == list(range(num_samples))


def test_weights_of_a_short_step_are_ones():
    built = plan(3, 8, 2, tail=Tail.short, shuffle=False)
    (step,) = over_ranks(built, 4, collate=samples_by_name, attach_weights=add_weights)
    weights = [(m.batch if isinstance(m, IdleMicrobatch) else m)["sample_weight"].tolist() for m in step]
    assert weights == [[1.0, 1.0], [1.0], [1.0], [1.0]]


@pytest.mark.parametrize("tail", [Tail.drop, Tail.short])
def test_chunks_are_the_same_on_any_number_of_ranks(tail):
    built = plan(29, num_epochs=2, num_lanes=2, is_chunked=True, tail=tail)
    for dp_size in (1, 2):
        assert list(map(busy, over_ranks(built, dp_size))) == expected(built)


# -- digests of what a rank reads


def test_peers_have_one_digest_and_others_another():
    built = plan(32, shuffle=False)
    digests = {
        (rank, step): stream(built, dp_size=2, dp_rank=rank).sample_digest(step) for rank in (0, 1) for step in (0, 3)
    }
    assert len(set(digests.values())) == 4
    assert all(0 <= digest < 2**56 for digest in digests.values())
    for other in (plan(32, shuffle=False), plan(32, 16, shuffle=False, num_epochs=2)):
        is_equal = stream(other, dp_size=2, dp_rank=0).sample_digest(3) == digests[0, 3]
        assert is_equal == (other == built)


# -- random numbers


@pytest.mark.parametrize("dataset", [Noise(32), OwnNoise(32), Subset(Noise(64), range(32))], ids=["all", "own", "many"])
def test_random_numbers_follow_from_the_position(dataset):
    built = plan(32, num_epochs=2)
    whole = over_ranks(built, 1, dataset=dataset)
    assert over_ranks(built, 4, dataset=dataset) == whole
    assert over_ranks(built, 2, dataset=dataset, workers=2) == whole
    # Each sample comes twice, with other numbers.
    noise = [sample[1:] for microbatch in itertools.chain(*whole) for sample in microbatch]
    assert len(set(noise)) == 64


class RareNoise(Numbers):
    """Draws from one generator, for one sample in ten."""

    def __init__(self, num_samples: int, draw) -> None:
        super().__init__(num_samples)
        self.draw = draw

    def __getitem__(self, index: int):
        self.num_loaded += 1
        return (index, self.draw() if index % 10 == 7 else 0.0)


@pytest.mark.parametrize(
    ("draw", "num_loaded_twice"),
    [
        # The first microbatch that draws is loaded twice.
        (random.random, 2),
        (np.random.randn, 2),
        (lambda: torch.rand(()).item(), 0),
        (torch.initial_seed, 0),
        (lambda: np.random.default_rng(torch.initial_seed()).random(), 0),
    ],
    ids=["py", "np", "torch", "seed", "np by the seed"],
)
def test_samples_that_seldom_draw_are_seeded_as_well(draw, num_loaded_twice):
    built = plan(40, shuffle=False)
    # Loader processes seed from the start.
    expected = over_ranks(built, 1, dataset=RareNoise(40, draw), workers=1)
    seed_all(0)
    np.random.randn()  # keeps another number back
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:3])
    dataset = RareNoise(40, draw)
    assert over_ranks(built, 1, dataset=dataset) == expected
    after = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:3])
    assert str(after) == str(before)
    assert torch.initial_seed() == 0
    assert dataset.num_loaded == 40 + num_loaded_twice
    # A resumed stream finds out at another place.
    for position in (2, 3):
        resumed = stream(built, RareNoise(40, draw))
        resumed.load_state_dict({**resumed.state_dict(), "num_steps": position, "consumed": 8 * position})
        assert list(map(list, resumed)) == expected[position:]


def test_samples_that_draw_nothing_are_loaded_once():
    dataset = Numbers(24)
    list(stream(plan(), dataset))
    assert dataset.num_loaded == 24


def test_a_collate_function_may_draw_too():
    def masked(samples: list) -> tuple:
        return (samples, torch.rand(len(samples)).tolist())

    whole = over_ranks(plan(), 1, collate=masked)
    assert over_ranks(plan(), 4, collate=masked) == whole


def test_another_seed_draws_other_numbers():
    draws = [over_ranks(plan(8, shuffle=False, seed=seed), 1, dataset=OwnNoise(8)) for seed in range(2)]
    assert draws[0] != draws[1]


def draw_all() -> tuple:
    return torch.rand(()).item(), np.random.rand(), random.random()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_training_does_not_notice_what_loading_draws():
    seed_all(0)
    undisturbed = [draw_all() for _ in range(3)]
    seed_all(0)
    packs = iter(stream(plan(), Noise(24)))
    assert [(next(packs), draw_all())[1] for _ in range(3)] == undisturbed


def test_a_thread_that_reads_ahead_leaves_the_generators_alone():
    seed_all(0)
    undisturbed = draw_all()
    seed_all(0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        packs = pool.submit(lambda: list(stream(plan(), OwnNoise(24)))).result()
    assert draw_all() == undisturbed
    assert packs == list(stream(plan(), OwnNoise(24)))


def test_seeding_can_be_turned_off():
    seed_all(0)
    undisturbed = [draw_all() for _ in range(8)]
    seed_all(0)
    (pack,) = stream(plan(8, shuffle=False), Noise(8), seeds_generators=False)
    assert [sample[1:] for microbatch in pack for sample in microbatch] == undisturbed


# -- errors


@pytest.mark.parametrize(
    ("error", "workers"),
    [(KeyError("text"), 0), (KeyError("text"), 1), (StopIteration(), 0), (IndexError("5"), 0)],
    ids=repr,
)
def test_a_dataset_that_raises_names_the_sample(error, workers):
    built = plan(24, shuffle=False)
    packs = iter(stream(built, Failing(24, error), workers=workers))
    with pytest.raises(
        SampleError, match=r"sample 5 of the dataset \(position 5 of the run\).*" + type(error).__name__
    ):
        next(packs)


def test_the_cause_of_an_error_is_kept():
    with pytest.raises(SampleError) as caught:
        next(iter(stream(plan(shuffle=False), Failing(24, KeyError("text")))))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_names_the_position_in_a_shuffled_epoch():
    built = plan(24, 24, 8)
    position = int(np.nonzero(built.step_samples(0).ravel() == 5)[0][0])
    with pytest.raises(SampleError, match=rf"sample 5 .*position {position} "):
        list(stream(built, Failing(24, ValueError())))


def test_a_dataset_that_loads_many_names_them_all():
    with pytest.raises(
        SampleError, match=r"samples 4, 5 of the dataset \(positions 4 to 5 of the run\) could not be loaded"
    ):
        list(stream(plan(shuffle=False), Subset(Failing(24, ValueError()), range(24))))


def test_a_collate_function_that_raises_names_the_samples():
    def refuse(samples: list) -> None:
        raise ValueError("ragged")

    with pytest.raises(SampleError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7 and 8 more .*positions 0 to 15.*ragged"):
        list(stream(plan(16, 16, 16, shuffle=False), collate=refuse))


@pytest.mark.timeout_s(30)
def test_a_worker_that_dies_is_reported():
    with pytest.raises(RuntimeError, match=r"step 1 of data-parallel rank 0, .* samples \d, \d of the .*process died"):
        list(stream(plan(24, shuffle=False), Dying(24), workers=1))


@pytest.mark.timeout_s(30)
def test_a_worker_that_hangs_is_reported():
    with pytest.raises(RuntimeError, match=r"samples 4, 5 of the dataset \(positions 4 to 5 of the run\).*timed out"):
        list(
            stream(
                plan(24, shuffle=False),
                Hanging(24),
                dp_size=2,
                dp_rank=1,
                loader=LoaderOptions(num_workers=1, timeout_s=1),
            )
        )


@pytest.mark.timeout_s(30)
@pytest.mark.parametrize("pin_memory", [False, True])
def test_what_cannot_leave_a_loader_process_is_reported(pin_memory):
    def lazily(samples):
        return (sample for sample in samples) if 3 in samples else samples

    loader = LoaderOptions(num_workers=1, pin_memory=pin_memory)
    with pytest.raises(TypeError, match=r"something that cannot be sent .*generator.* set num_workers to 0"):
        list(stream(plan(shuffle=False), collate=lazily, loader=loader))
    # Nothing is sent without loader processes.
    loader = LoaderOptions(pin_memory=pin_memory)
    assert list(itertools.chain(*stream(plan(shuffle=False), collate=lazily, loader=loader)))


def test_what_goes_to_loader_processes_can_travel():
    packs = stream(plan(), collate=list, workers=1)
    loader = pickle.loads(pickle.dumps(packs._microbatches.items))  # noqa: S301 - as the loader does it
    request = next(packs.remaining_requests())
    assert loader[request] == request.samples
