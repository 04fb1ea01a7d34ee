"""Packing with loader processes: the same packs as without, resumed anywhere, and nothing is loaded far ahead."""

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from d9d.dataset.lanes import (
    BatchSchedule,
    BestFitPacker,
    DataPlan,
    ElasticLaneStream,
    LaneMixture,
    LaneRecords,
    LoaderOptions,
    RecordLoader,
    SampleError,
    StepRange,
    WrapPacker,
)

NUM_LANES, NUM_TOKENS, NUM_STEPS = 4, 6, 6
KINDS = ["wrap", "best fit", "mixture"]


class Texts:
    """Document i holds i + 1 times the token i."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


class NoisyTexts(Texts):
    """Tokens are drawn from all global generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.randrange(99), np.random.randint(99), *torch.randint(99, (index + 1,))])


class SeededTexts(Texts):
    def getitem_seeded(self, index: int, seed: int) -> torch.Tensor:
        return torch.full((index + 1,), seed % 1000)


class FailingTexts(Texts):
    """Document 5 cannot be loaded."""

    def __init__(self, fail) -> None:
        self.fail = fail

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.fail() if index == 5 else super().__getitem__(index)


class UnlikeTexts:
    """Even documents have one token, odd ones as many as a sequence; counts what all processes have loaded."""

    def __init__(self) -> None:
        self.num_loaded = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_loaded[index % 2] += 1
        return torch.full((NUM_TOKENS if index % 2 else 1,), index)


def plan(**changes) -> DataPlan:
    defaults = {"num_samples": 9, "schedule": BatchSchedule.constant(16), "microbatch_size": 2, "num_lanes": NUM_LANES}
    return DataPlan(**{**defaults, "num_epochs": None, **changes})


def collate(sequences: list) -> list:
    return [(sequence.tokens.tolist(), sequence.lengths) for sequence in sequences]


def masking_collate(sequences: list) -> tuple:
    return collate(sequences), torch.rand(2).tolist(), random.random()


def build_lane(kind: str, records, lane: int):
    match kind:
        case "wrap":
            return WrapPacker(records(), NUM_TOKENS)
        case "best fit":
            return BestFitPacker(records(), NUM_TOKENS, 5)
        case _:
            streams = [WrapPacker(records(), NUM_TOKENS), BestFitPacker(records(), NUM_TOKENS, 5)]
            return LaneMixture(streams, [2, 1], lane, NUM_LANES)


def stream(
    kind: str, workers: int, *, dataset=None, built: DataPlan | None = None, dp_size=1, dp_rank=0, **changes
) -> ElasticLaneStream:
    built, dataset = built or plan(), dataset or Texts()
    persistent = changes.pop("persistent", False)
    options = {"num_workers": workers, "persistent_workers": persistent, **changes.pop("options", {})}
    loader = RecordLoader(LoaderOptions(**options))
    seeds = changes.get("seeds_generators", False)

    def lane_of(lane: int):
        return build_lane(kind, lambda: LaneRecords(dataset, built, lane, loader=loader, seeds_generators=seeds), lane)

    options = {"total_steps": NUM_STEPS, "dp_size": dp_size, "dp_rank": dp_rank, "loader": loader, **changes}
    return ElasticLaneStream(lane_of, options.pop("collate", collate), built, **options)


def resumed(saved: list[ElasticLaneStream], kind: str, workers: int, dp_size: int, **changes) -> list[list]:
    """Go on with other ranks, and return the microbatches of each step."""
    states = [packs.state_dict() for packs in saved]
    lanes = {key: value for state in states for key, value in state["lane_states"].items()}
    ranks = [stream(kind, workers, dp_size=dp_size, dp_rank=rank, **changes) for rank in range(dp_size)]
    for packs in ranks:
        packs.load_state_dict({**states[0], "lane_states": lanes})
    return [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(2, True), *(pytest.param(n, p, marks=pytest.mark.exhaustive) for n in (1, 3) for p in (False, True))],
)
def test_packs_do_not_depend_on_workers(kind, workers, persistent):
    whole = list(stream(kind, 0))
    packs = stream(kind, workers, persistent=persistent)
    first = list(itertools.islice(packs, 2))
    state = packs.state_dict()
    # What was read ahead does not count; the same stream goes on, and goes back.
    assert first + list(packs) == whole
    packs.load_state_dict(state)
    assert list(packs) == whole[2:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("done", "workers_after"),
    [(3, 1), *(pytest.param(n, w, marks=pytest.mark.exhaustive) for n in range(NUM_STEPS + 1) for w in range(4))],
)
def test_a_run_goes_on_with_other_workers_on_other_ranks(kind, done, workers_after):
    whole = [list(step) for step in stream(kind, 0)]
    saved = [stream(kind, 1, dp_size=2, dp_rank=rank) for rank in range(2)]
    first = [list(itertools.islice(packs, done)) for packs in saved]
    assert [list(itertools.chain(*step)) for step in zip(*first, strict=True)] == whole[:done]
    assert resumed(saved, kind, workers_after, 1) == whole[done:]


def test_steps_are_jumped_over():
    schedule = BatchSchedule(ramp=plan().schedule.ramp, skips=(StepRange(1, 4),))
    whole = list(stream("best fit", 0, total_steps=9))
    jumping = stream("best fit", 1, built=plan(schedule=schedule))
    assert list(jumping) == [whole[0], *whole[4:]]


@pytest.mark.parametrize("dataset", [NoisyTexts(), SeededTexts()], ids=["global", "own"])
def test_random_numbers_do_not_depend_on_workers(dataset):
    options = {"dataset": dataset, "collate": masking_collate, "seeds_generators": True, "total_steps": 3}
    assert list(stream("mixture", 2, **options)) == list(stream("mixture", 0, **options))


def test_lanes_that_are_unlike_are_not_read_far_ahead():
    dataset, workers, prefetch = UnlikeTexts(), 2, 3
    built = plan(num_samples=1000, num_lanes=2, shuffle=False, schedule=BatchSchedule.constant(4))
    options = {"prefetch_factor": prefetch}
    packs = stream("wrap", workers, dataset=dataset, built=built, options=options, total_steps=60)
    num_packs = sum(1 for _ in packs)
    # Each step takes two sequences of each lane: six documents each, or one.
    taken = torch.tensor([2 * NUM_TOKENS * num_packs, 2 * num_packs])
    per_request = NUM_TOKENS + 1  # the documents of all microbatches over their number
    assert ((dataset.num_loaded - taken) <= (workers * prefetch + 1) * per_request).all()


def test_what_a_packer_expects_is_what_it_asks_for():
    class Watched:
        def __init__(self) -> None:
            self.asked: list[int] = []
            self.first: list[int] = []

        def __call__(self, number: int) -> torch.Tensor:
            self.asked.append(number)
            return torch.full((number % 9 + 1,), number)

        def expect(self, first, then: int) -> None:
            self.first, self.then = list(first), then

    for build in (lambda documents: WrapPacker(documents, 6), lambda documents: BestFitPacker(documents, 6, 8)):
        packer = build(Watched())
        for _ in range(20):
            next(packer)
            documents = Watched()
            other = build(documents)
            other.load_state_dict(packer.state_dict())
            for _ in range(40):
                next(other)
            later = [number for number in documents.asked if number not in documents.first]
            assert set(documents.first) <= set(documents.asked)
            assert later == list(range(documents.then, documents.then + len(later)))


def records_of(samples: list, workers: int = 1) -> LaneRecords:
    built = plan(num_samples=len(samples), shuffle=False, num_lanes=1)
    return LaneRecords(samples, built, 0, loader=RecordLoader(LoaderOptions(num_workers=workers)))


def test_records_come_as_they_are():
    samples = [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        {"b": torch.arange(4).view(2, 2).T, "a": ("text", None)},
        torch.tensor([1 + 2j]).conj(),
        None,
    ]
    records = records_of(samples)
    found = [records(number) for number in range(5)]
    assert torch.equal(found[0], samples[0])
    assert found[1].shape == (0, 3)
    assert list(found[2]) == ["b", "a"]
    assert found[2]["b"].tolist() == [[0, 2], [1, 3]]
    assert found[2]["a"] == ("text", None)
    assert found[3].tolist() == [1 - 2j]
    assert found[4] is None
    found[2]["b"].zero_()  # they can be changed


def test_records_may_be_asked_for_in_any_order():
    records = records_of(list(range(40)))
    numbers = [3, 4, 20, 5, 20, 39, 40, 0, 1, 2]
    assert [records(number) for number in numbers] == [number % 40 for number in numbers]


def raise_(error: BaseException):
    raise error


def test_a_dataset_that_raises_names_the_record_when_it_is_needed():
    built = plan(shuffle=False, num_lanes=1)
    dataset = FailingTexts(lambda: raise_(KeyError("text")))
    # Documents of 1 + 2 + 3 + 4 + 5 tokens come before it: two sequences.
    for workers in (0, 1):
        packs = iter(stream("wrap", workers, dataset=dataset, built=built))
        with pytest.raises(
            SampleError, match=r"^sample 5 of .*\(position 5 .*, record 5 of lane 0\).*KeyError"
        ) as caught:
            next(packs)
    assert "in raise_" in "".join(caught.value.__notes__)
    records = LaneRecords(dataset, built, 0, loader=RecordLoader(LoaderOptions(num_workers=1)))
    assert [len(records(number)) for number in range(5)] == [1, 2, 3, 4, 5]
    for _ in range(2):
        with pytest.raises(SampleError, match="sample 5"):
            records(5)
    assert len(records(6)) == 7


def test_a_failing_step_leaves_the_position_as_it_was():
    whole = list(stream("best fit", 0))
    is_broken = torch.ones(1).share_memory_()

    def fail_once() -> torch.Tensor:
        if is_broken.item():
            raise_(OSError("disk"))
        return Texts()[5]

    packs = stream("best fit", 1, dataset=FailingTexts(fail_once))
    done = []
    with pytest.raises(SampleError, match="disk"):
        done.extend(packs)
    is_broken.zero_()
    assert done + list(packs) == whole


@pytest.mark.timeout_s(60)
def test_a_worker_that_dies_or_hangs_names_the_record():
    built = plan(shuffle=False, num_lanes=1)
    dying = FailingTexts(lambda: os.kill(os.getpid(), signal.SIGKILL))
    hanging = FailingTexts(lambda: time.sleep(3))
    for dataset, timeout_s, message in ((dying, 0, "process died"), (hanging, 1, "timed out")):
        options = {"timeout_s": timeout_s, "prefetch_factor": 1}
        packs = stream("wrap", 1, dataset=dataset, built=built, options=options)
        with pytest.raises(RuntimeError, match=rf"waited for sample \d of .*record \d of lane 0\).*{message}"):
            list(packs)


def test_records_are_not_pinned():
    with pytest.raises(ValueError, match=r"pin_memory \(True\).*PinMemoryMicrobatchPackStream"):
        RecordLoader(LoaderOptions(pin_memory=True))


def test_lanes_are_built_before_they_are_read():
    loader = RecordLoader(LoaderOptions(num_workers=1))
    LaneRecords(Texts(), plan(), 0, loader=loader)(0)
    with pytest.raises(RuntimeError, match="do not know a lane"):
        LaneRecords(Texts(), plan(), 1, loader=loader)
