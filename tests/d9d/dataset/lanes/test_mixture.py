"""Mixtures: exact proportions, in an order that depends on the weights alone."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.dataset.lanes import LaneMixture, MixtureDataset, MixtureSchedule, dataset_fingerprint

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


class Named:
    """Sample i is (name, i)."""

    def __init__(self, name: str, num_samples: int) -> None:
        self.name = name
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int):
        return (self.name, index)


class Counting:
    """The stream of one source."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0

    def __next__(self):
        self.number += 1
        return (self.name, self.number - 1)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        self.number = state_dict["number"]


def test_a_period_by_hand():
    # The 3 draws of the first source must be through by draws 4/3, 8/3, 4 and the one of the second by 4: it is the rarer.
    schedule = MixtureSchedule([3, 1])
    assert [schedule.place(draw) for draw in range(8)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 1),
        (0, 5),
    ]


@settings(deadline=None)
@given(WEIGHTS)
def test_a_period_holds_each_source_as_often_as_its_weight(weights):
    schedule = MixtureSchedule(weights)
    assert schedule.period == sum(weights)
    counts: Counter = Counter()
    for draw in range(3 * schedule.period):
        source, number = schedule.place(draw)
        assert number == counts[source]
        counts[source] += 1
        # Never a whole draw away from the exact share.
        assert all(abs(counts[i] * sum(weights) - (draw + 1) * w) < sum(weights) for i, w in enumerate(weights))
    assert counts == {source: 3 * weight for source, weight in enumerate(weights)}


def test_a_late_draw_is_found_at_once():
    assert MixtureSchedule([3, 1]).place(4 * 10**12 + 2) == (1, 10**12)


@pytest.mark.parametrize(
    ("weights", "message"),
    [([], "at least one source"), ([1, 0, -1], r"weight 1 \(0\).*weight 2 \(-1\)"), ([10**5, 1], "sum up to 100001")],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        MixtureSchedule(weights)


def mixed(**changes) -> MixtureDataset:
    return MixtureDataset([Named("a", 5), Named("b", 3)], [2, 1], **{"num_samples": 30, **changes})


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixed_dataset_reads_each_source_in_epochs(shuffle):
    dataset = mixed(shuffle=shuffle)
    samples = [dataset[index] for index in range(len(dataset))]
    by_name = {name: [index for other, index in samples if other == name] for name in "ab"}
    assert (len(by_name["a"]), len(by_name["b"])) == (20, 10)
    for name, size in (("a", 5), ("b", 3)):
        epochs = [by_name[name][at : at + size] for at in range(0, len(by_name[name]) // size * size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert (len({tuple(epoch) for epoch in epochs}) > 1) == shuffle


def test_sources_that_take_seeds_get_one_per_draw():
    class Seeded(Named):
        def getitem_seeded(self, index: int, seed: int):
            return seed

    dataset = MixtureDataset([Seeded("a", 2)], [1], num_samples=8)
    seeds = [dataset[index] for index in range(8)]
    assert len(set(seeds)) == 8
    assert seeds == [dataset[index] for index in range(8)]
    assert seeds != [MixtureDataset([Seeded("a", 2)], [1], num_samples=8, seed=1)[index] for index in range(8)]


def test_the_fingerprint_sees_sources_and_weights():
    sources = [Named("a", 5), Named("b", 3)]
    fingerprints = {
        dataset_fingerprint(dataset)
        for dataset in (
            mixed(),
            mixed(seed=1),
            mixed(shuffle=False),
            mixed(num_samples=31),
            MixtureDataset(sources, [1, 1], num_samples=30),
            MixtureDataset([sources[0], Named("c", 3)], [2, 1], num_samples=30),
        )
    }
    assert len(fingerprints) == 6
    assert dataset_fingerprint(mixed()) in fingerprints


@pytest.mark.parametrize(
    ("datasets", "weights", "num_samples", "message"),
    [
        ([Named("a", 0)], [1, 2], 0, r"dataset 0 is empty.*1 datasets need as many weights, not 2.*num_samples \(0\)"),
        ([Named("a", 1)], [0], 1, r"weight 0 \(0\)"),
    ],
)
def test_what_cannot_be_mixed_is_refused(datasets, weights, num_samples, message):
    with pytest.raises(ValueError, match=message):
        MixtureDataset(datasets, weights, num_samples=num_samples)


@pytest.mark.parametrize("index", [-1, 30])
def test_indices_outside_are_refused(index):
    with pytest.raises(IndexError, match=f"index {index} is outside a mixture of 30"):
        mixed()[index]


def lane(number: int, weights: tuple[int, int] = (3, 1), num_lanes: int = 4) -> LaneMixture:
    return LaneMixture([Counting("a"), Counting("b")], weights, number, num_lanes)


def test_lanes_draw_in_the_same_proportion_and_not_at_once():
    draws = [[next(mixture)[0] for _ in range(8)] for mixture in map(lane, range(4))]
    assert all(Counter(of_lane) == {"a": 6, "b": 2} for of_lane in draws)
    # Each element number holds the mixture over the lanes.
    assert all(Counter(at_once) == {"a": 3, "b": 1} for at_once in zip(*draws, strict=True))


def test_a_rare_source_comes_evenly_over_many_lanes():
    lanes = [lane(number, (127, 1), 64) for number in range(64)]
    rare = [sum(next(mixture)[0] == "b" for mixture in lanes) for _ in range(128)]
    # Every 128th of 64 elements at a time.
    for num_elements, share in ((30, 15), (60, 30), (120, 60), (128, 64)):
        assert abs(sum(rare[:num_elements]) - share) < 1


@settings(deadline=None)
@given(st.tuples(st.integers(1, 12), st.integers(1, 12)), st.integers(1, 13))
def test_a_lane_draws_a_period_in_as_many_elements(weights, num_lanes):
    """So no lane leaves out the records that it has of some source."""
    period = sum(weights)
    draws = [
        [next(mixture)[0] for _ in range(2 * period)]
        for mixture in (lane(i, weights, num_lanes) for i in range(num_lanes))
    ]
    for of_lane in draws:
        for start in (0, period):
            assert Counter(of_lane[start : start + period]) == {"a": weights[0], "b": weights[1]}
    for count in range(1, 2 * period + 1):
        num_b = sum(of_lane[:count].count("b") for of_lane in draws)
        assert abs(num_b * period - count * num_lanes * weights[1]) < period


def test_a_mixed_lane_goes_on_from_every_position():
    whole_stream, saving = lane(1), lane(1)
    whole = [next(whole_stream) for _ in range(12)]
    for done in range(12):
        resumed = lane(1)
        resumed.load_state_dict(json.loads(json.dumps(saving.state_dict())))
        assert [next(resumed) for _ in range(12 - done)] == whole[done:]
        next(saving)


def test_another_number_of_sources_is_refused():
    with pytest.raises(ValueError, match="1 streams need as many weights, not 2"):
        LaneMixture([Counting("a")], [1, 2], 0, 1)
    with pytest.raises(ValueError, match="2 sources, this one has 1"):
        LaneMixture([Counting("a")], [1], 0, 4).load_state_dict(lane(0).state_dict())


def test_states_of_other_orders_are_refused():
    state = lane(0).state_dict()
    with pytest.raises(ValueError, match="has 4 lanes, this one has 8"):
        lane(0, num_lanes=8).load_state_dict(state)
    del state["num_lanes"]
    with pytest.raises(ValueError, match="an order of its own by each lane"):
        lane(0).load_state_dict(state)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_lane_that_is_not_there_is_refused(number):
    with pytest.raises(ValueError, match=rf"lane \({number}\) must be from 0 to 3"):
        lane(number)
