"""Draws from several sources in fixed proportions, by a schedule instead of by chance."""

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from d9d.dataset.lanes.fingerprint import dataset_fingerprint
from d9d.dataset.lanes.lane_stream import LaneStream
from d9d.dataset.lanes.permutation import Permutation
from d9d.dataset.lanes.sample_loading import MapDataset, SampleSeeds, load_sample
from d9d.dataset.sharded import derive_seed

__all__ = ["LaneMixture", "MixtureDataset", "MixtureSchedule"]

T = TypeVar("T")

_MAX_PERIOD = 100_000


class MixtureSchedule:
    """Tells for each draw which source it is from, and how many draws from that source came before.

    A period holds as many draws as the weights sum up to, of each source as many as its weight. After any number of
    draws, the count of each source is less than one away from its exact share: the i-th of the w draws of a source is
    made between draw i * P / w and draw (i + 1) * P / w of the period P, and of the sources whose time has come, the one
    that must be through first is next, the rarer one of equals.

    Source: Tijdeman: The Chairman Assignment Problem, Discrete Mathematics 32, 1980.

    Args:
        weights: Draws of each source per period, positive integers.

    Raises:
        ValueError: There are no weights, one is below 1, or the period is longer than 100,000.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        problems = [
            f"weight {index} ({weight}) must be at least 1." for index, weight in enumerate(weights) if weight < 1
        ]
        if not weights:
            problems.append("a mixture needs at least one source.")
        if sum(weights) > _MAX_PERIOD:
            problems.append(
                f"the weights sum up to {sum(weights)}, more than {_MAX_PERIOD}: round them to smaller ones."
            )
        if problems:
            raise ValueError(" ".join(problems))
        self.weights = tuple(weights)
        self._period = _spread(self.weights)

    @property
    def period(self) -> int:
        """Draws after which the schedule starts over."""
        return len(self._period)

    def place(self, draw: int) -> tuple[int, int]:
        """Return the source of a draw, and the number of draws from this source before it.

        Args:
            draw: Number of the draw, from 0.
        """
        num_periods, rest = divmod(draw, self.period)
        source, within = self._period[rest]
        return source, num_periods * self.weights[source] + within


def _spread(weights: Sequence[int]) -> list[tuple[int, int]]:
    """Return the source of each draw of a period, and its draws before it."""
    period = sum(weights)
    counts = [0] * len(weights)
    draws: list[tuple[int, int]] = []
    for draw in range(period):
        # Rounded up by negating: the end of the time for the next draw of a source.
        _, _, source = min(
            (-(-(count + 1) * period // weight), weight, source)
            for source, (count, weight) in enumerate(zip(counts, weights, strict=True))
            if count * period // weight <= draw
        )
        draws.append((source, counts[source]))
        counts[source] += 1
    return draws


class MixtureDataset:
    """Shows a map-style dataset that mixes others: sample i is draw i of the schedule.

    Each source is read in epochs of its own, shuffled anew each time. Use it with `shuffle=False`, which keeps the
    proportions exact within every period. A source that takes seeds (`SeededDataset`) gets one for each draw.

    Args:
        datasets: Map-style datasets of at least one sample.
        weights: Draws of each per period.
        num_samples: Length to show, such as the samples of all steps of the run.
        seed: Seed of the shuffles.
        shuffle: Whether to shuffle the sources.

    Raises:
        ValueError: Datasets and weights do not fit together; names all problems.
    """

    def __init__(
        self,
        datasets: Sequence[MapDataset],
        weights: Sequence[int],
        *,
        num_samples: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        problems = [f"dataset {index} is empty." for index, dataset in enumerate(datasets) if len(dataset) == 0]
        if len(datasets) != len(weights):
            problems.append(f"{len(datasets)} datasets need as many weights, not {len(weights)}.")
        if num_samples < 1:
            problems.append(f"num_samples ({num_samples}) must be at least 1.")
        if problems:
            raise ValueError(" ".join(problems))
        self._datasets = list(datasets)
        self._schedule = MixtureSchedule(weights)
        self._num_samples = num_samples
        self._seed = seed
        self._seeds = SampleSeeds(seed)
        self._shuffle = shuffle

    def __len__(self) -> int:
        return self._num_samples

    # `Any`: samples are of any type.
    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        if not 0 <= index < self._num_samples:
            raise IndexError(f"index {index} is outside a mixture of {self._num_samples} samples.")
        source, draw = self._schedule.place(index)
        dataset = self._datasets[source]
        epoch, offset = divmod(draw, len(dataset))
        if self._shuffle:
            offset = _permutation(len(dataset), derive_seed(self._seed, source), epoch)[offset]
        return load_sample(dataset, offset, self._seeds.at(index), seeds_generators=False)

    def fingerprint(self) -> str:
        """Return a text that changes with any of the datasets and with the way they are mixed."""
        parts = [str(self._schedule.weights), str(self._seed), str(self._shuffle), str(self._num_samples)]
        parts.extend(dataset_fingerprint(dataset) for dataset in self._datasets)
        return f"mixture/{hashlib.blake2b(' '.join(parts).encode(), digest_size=16).hexdigest()}"


class LaneMixture(Generic[T]):
    """Draws the elements of one lane from several streams of this lane.

    [Note: lanes take turns at the draws]
    The elements of number q of all L lanes are the draws q * L to (q + 1) * L - 1 of one schedule. So the share of each
    source is exact to within one element after any number of elements per lane. Were lane l always to take the l-th of
    these, some lanes would never draw from some sources where L and the period have a common divisor, and nobody would read
    the records that these lanes have there. So lanes move on by one draw each time that the schedule is back at the start
    of its period: in as many elements as the period is long, a lane makes each draw of the period once.

    Args:
        streams: The stream of each source for this lane.
        weights: Draws of each per period.
        lane: Index of the lane.
        num_lanes: Number of lanes, which draw together.

    Raises:
        ValueError: There are not as many streams as weights, the weights are wrong, or there is no such lane.
    """

    def __init__(self, streams: Sequence[LaneStream[T]], weights: Sequence[int], lane: int, num_lanes: int) -> None:
        if len(streams) != len(weights):
            raise ValueError(f"{len(streams)} streams need as many weights, not {len(weights)}.")
        if not 0 <= lane < num_lanes:
            raise ValueError(f"lane ({lane}) must be from 0 to {num_lanes - 1}.")
        self._streams = list(streams)
        self._schedule = MixtureSchedule(weights)
        self._lane = lane
        self._num_lanes = num_lanes
        self._elements_per_turn = self._schedule.period // math.gcd(self._schedule.period, num_lanes)
        self._num_draws = 0

    def __next__(self) -> T:
        # See [Note: lanes take turns at the draws].
        turn = self._num_draws // self._elements_per_turn
        source, _ = self._schedule.place(self._num_draws * self._num_lanes + (self._lane + turn) % self._num_lanes)
        element = next(self._streams[source])
        self._num_draws += 1
        return element

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws of this lane, the number of lanes and the state of each source."""
        return {
            "num_draws": self._num_draws,
            "num_lanes": self._num_lanes,
            "sources": [stream.state_dict() for stream in self._streams],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ValueError: The state is of another number of sources or lanes, or of an order that is not drawn any more.
        """
        saved = state_dict["sources"]
        if len(saved) != len(self._streams):
            raise ValueError(f"the saved mixture has {len(saved)} sources, this one has {len(self._streams)}.")
        if "num_lanes" not in state_dict:
            raise ValueError(
                "the saved mixture was drawn in an order of its own by each lane, which is not exact over the lanes: resume with "
                "the version that saved it, or start a new run."
            )
        if state_dict["num_lanes"] != self._num_lanes:
            raise ValueError(f"the saved mixture has {state_dict['num_lanes']} lanes, this one has {self._num_lanes}.")
        for stream, state in zip(self._streams, saved, strict=True):
            stream.load_state_dict(state)
        self._num_draws = state_dict["num_draws"]


@functools.lru_cache(maxsize=64)
def _permutation(num_samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_samples, seed, epoch)
