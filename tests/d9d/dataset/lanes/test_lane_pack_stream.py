"""Packs from lanes with a state: the same on any number of ranks, resumed anywhere."""

import itertools
import json

import pytest
import torch

from d9d.core.protocol import MicrobatchPackStream
from d9d.dataset.lanes import (
    BatchSchedule,
    BestFitPacker,
    DataPlan,
    ElasticLaneStream,
    LaneMixture,
    LaneRecords,
    RampPoint,
    StepRange,
    Tail,
    WrapPacker,
)
from d9d.dataset.pack_stream import has_rank_invariant_state

SIZES = [1, 2, 4]


class Texts:
    """Document i holds i + 1 times the token i."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


def plan(**changes) -> DataPlan:
    defaults = {"num_samples": 9, "schedule": BatchSchedule.constant(16), "microbatch_size": 2, "num_epochs": None}
    return DataPlan(**{**defaults, "num_lanes": 4, **changes})


def collate(sequences: list) -> list:
    return [(sequence.tokens.tolist(), sequence.lengths) for sequence in sequences]


def build_lane(kind: str, built: DataPlan, lane: int):
    records = LaneRecords(Texts(), built, lane)
    match kind:
        case "wrap":
            return WrapPacker(records, 6)
        case "best fit":
            return BestFitPacker(records, 6, 5)
        case _:
            return LaneMixture([WrapPacker(records, 6), BestFitPacker(records, 6, 5)], [2, 1], lane, built.num_lanes)


def stream(kind: str, built: DataPlan, dp_size: int = 1, dp_rank: int = 0, **changes) -> ElasticLaneStream:
    return ElasticLaneStream(
        lambda lane: build_lane(kind, built, lane),
        collate,
        built,
        dp_size=dp_size,
        dp_rank=dp_rank,
        **{"total_steps": 6, **changes},
    )


def over_ranks(streams: list[ElasticLaneStream], count: int | None = None) -> list[list]:
    packs = [list(itertools.islice(packs, count)) for packs in streams]
    return [list(itertools.chain(*step)) for step in zip(*packs, strict=True)]


def ranks(kind: str, built: DataPlan, dp_size: int) -> list[ElasticLaneStream]:
    return [stream(kind, built, dp_size, dp_rank) for dp_rank in range(dp_size)]


def gathered(streams: list[ElasticLaneStream]) -> dict:
    """What a checkpoint holds: the keys of all ranks."""
    states = [packs.state_dict() for packs in streams]
    lanes = {key: value for state in states for key, value in state["lane_states"].items()}
    return json.loads(json.dumps({**states[0], "lane_states": lanes}))


def test_a_stream_says_what_the_loop_asks():
    packs = stream("wrap", plan())
    assert isinstance(packs, MicrobatchPackStream)
    assert (packs.total_steps, packs.num_samples_of(2), has_rank_invariant_state(packs)) == (6, 32, True)


@pytest.mark.parametrize("kind", ["wrap", "best fit", "mixture"])
def test_any_number_of_ranks_can_go_on_after_any_step(kind):
    whole = over_ranks(ranks(kind, plan(), 1))
    assert [len(step) for step in whole] == [8] * 6
    for before, after in itertools.product(SIZES, SIZES):
        for done in range(7):
            saved = ranks(kind, plan(), before)
            assert over_ranks(saved, done) == whole[:done]
            resumed = ranks(kind, plan(), after)
            for packs in resumed:
                packs.load_state_dict(gathered(saved))
            assert over_ranks(resumed) == whole[done:]


def test_each_lane_gives_neighbouring_microbatches():
    (first,) = itertools.islice(stream("wrap", plan()), 1)
    lane_1 = build_lane("wrap", plan(), 1)
    sequences = collate([next(lane_1) for _ in range(4)])
    # 8 microbatches over 4 lanes: lane 1 gives the third and the fourth.
    assert first[2:4] == (sequences[:2], sequences[2:])


def test_batches_may_grow():
    built = plan(schedule=BatchSchedule(ramp=(RampPoint(0, 8), RampPoint(2, 16))))
    assert [len(step) for step in over_ranks(ranks("wrap", built, 2))] == [4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("kind", ["wrap", "best fit", "mixture"])
def test_steps_are_jumped_over(kind):
    schedule = BatchSchedule(ramp=(RampPoint(0, 16),), skips=(StepRange(0, 1), StepRange(3, 5)))
    whole = over_ranks([stream(kind, plan(), total_steps=9)])
    # The first step reads the second one, and the fourth the seventh.
    expected = [whole[step] for step in (1, 2, 3, 6, 7, 8)]
    assert over_ranks(ranks(kind, plan(schedule=schedule), 2)) == expected
    # A run that was saved before the steps that it then jumps over.
    first = BatchSchedule(ramp=(RampPoint(0, 16),), skips=(StepRange(0, 1),))
    saved = ranks(kind, plan(schedule=first), 4)
    assert over_ranks(saved, 3) == expected[:3]
    resumed = ranks(kind, plan(schedule=schedule), 1)
    for packs in resumed:
        packs.load_state_dict(gathered(saved))
    assert over_ranks(resumed) == expected[3:]


def test_without_end_the_stream_goes_on():
    packs = stream("wrap", plan(), total_steps=None)
    assert packs.total_steps is None
    assert len(list(itertools.islice(packs, 20))) == 20


def test_a_failing_step_leaves_the_position_as_it_was():
    built = plan()
    whole = list(stream("best fit", built))
    failures = iter([OSError("disk")])

    def collate_once(sequences: list) -> list:
        if sequences[0].tokens.tolist() == whole[2][5][0][0]:
            for error in failures:
                raise error
        return collate(sequences)

    packs = ElasticLaneStream(
        lambda lane: build_lane("best fit", built, lane), collate_once, built, dp_size=1, dp_rank=0, total_steps=6
    )
    done = []
    with pytest.raises(OSError, match="disk"):
        done.extend(packs)
    assert done == whole[: len(done)]
    assert packs.state_dict()["num_steps"] == len(done) < 3
    resumed = stream("best fit", built)
    resumed.load_state_dict(packs.state_dict())
    assert list(resumed) == whole[len(done) :]


def test_an_iterator_that_was_overtaken_is_stale():
    packs = stream("wrap", plan())
    old = iter(packs)
    next(old)
    packs.load_state_dict(packs.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(old)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 2}, r"Changed: lanes \(checkpoint: 4, now: 2\)"),
        ({"seed": 1}, r"seed \(checkpoint: 0, now: 1\)"),
    ],
)
def test_other_lanes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        stream("wrap", plan(**changes)).load_state_dict(stream("wrap", plan()).state_dict())


def test_a_state_that_lacks_a_lane_is_refused():
    saved = stream("wrap", plan(), dp_size=2, dp_rank=0).state_dict()
    with pytest.raises(ValueError, match=r"no state for the lanes \[2, 3\], only for \['0', '1'\]"):
        stream("wrap", plan()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("changes", "dp_size", "message"),
    [
        ({}, 3, "does not divide the number of lanes"),
        ({"tail": Tail.pad, "num_epochs": 1}, 1, r"not 'pad'.*num_epochs \(1\) cannot be kept"),
    ],
)
def test_plans_that_lanes_cannot_follow_are_refused(changes, dp_size, message):
    with pytest.raises(ValueError, match=message):
        stream("wrap", plan(**changes), dp_size)
