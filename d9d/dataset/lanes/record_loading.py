"""Reads the records of lanes ahead in loader processes: which lane will ask for which of them is known only roughly."""

import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler

from d9d.dataset.lanes.generators import may_seed_generators
from d9d.dataset.lanes.loader_processes import ItemLoader, LoaderOptions, loader_failure
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.sample_loading import MapDataset, SampleError, SampleSeeds, load_sample

__all__ = ["LaneSource", "RecordLoader"]


class LaneSource:
    """Loads the records of one lane, where it is called. It travels to loader processes.

    Args:
        dataset: Map-style dataset.
        plan: Order, seed and number of lanes.
        lane: Index of the lane.
        seeds_generators: Seed the global generators before each record, where that disturbs no other thread.
    """

    def __init__(self, dataset: MapDataset, plan: DataPlan, lane: int, *, seeds_generators: bool) -> None:
        self._dataset = dataset
        self._order = plan.order
        self._seeds = SampleSeeds(plan.seed)
        self._lane = lane
        self._num_lanes = plan.num_lanes
        self._seeds_generators = seeds_generators

    # `Any`: samples are of any type.
    def load(self, number: int) -> Any:  # noqa: ANN401
        """Load a record. Datasets that take seeds (`SeededDataset`) get one.

        Raises:
            SampleError: The dataset raised; names sample and position.
        """
        position = number * self._num_lanes + self._lane
        seeds = self._seeds_generators and may_seed_generators()
        try:
            return load_sample(
                self._dataset, self._order.sample(position), self._seeds.at(position), seeds_generators=seeds
            )
        except Exception as error:
            raise SampleError(f"{self.describe(number)} could not be loaded: {error!r}") from error

    def describe(self, number: int) -> str:
        """Name the sample and the position of a record, for messages."""
        position = number * self._num_lanes + self._lane
        return (
            f"sample {self._order.sample(position)} of the dataset (position {position} of the run, record {number} of lane "
            f"{self._lane})"
        )


class RecordLoader:
    """Loads the records of all lanes of a rank ahead, in one set of loader processes. Content and order do not change.

    Give it to the `LaneRecords` of these lanes, and to the `ElasticLaneStream` that draws from them.

    [Note: which records are read ahead]
    Loader processes get requests for several records of one lane each: as many as make a microbatch, by what microbatches
    have taken so far. The next request goes to the lane that has the fewest records ahead, unless one asks for a record that
    was not requested yet. A new request is made for each one that is answered, and an answer is waited for only if a record
    is missing. So a lane has at most one request more ahead than there are under way, beside records that it has kept for
    later: what is held does not grow, however unlike the documents of the lanes are.

    Args:
        options: Loader processes and how they load; without any, records are loaded where they are asked for.

    Raises:
        ValueError: Records shall be put in page-locked memory: it is the packs made of them that go to the device.
    """

    def __init__(self, options: LoaderOptions) -> None:
        if options.pin_memory:
            raise ValueError(
                "pin_memory (True) has nothing to pin in records, which are packed first: set False, and put the stream into a "
                "PinMemoryMicrobatchPackStream."
            )
        self._options = options
        self._sources: list[LaneSource] = []
        self._ahead = _Ahead()
        self._seeds = torch.Generator()
        self._loader: Iterable[_Answer] | None = None
        self._answers: Iterator[_Answer] | None = None
        self.num_taken = 0
        """Records that were handed out."""

    @property
    def has_workers(self) -> bool:
        """Tell whether there are loader processes."""
        return self._options.num_workers > 0

    def add(self, source: LaneSource) -> int:
        """Return the number under which the records of a source can be asked for. All are added before the first is."""
        if self._loader is not None:
            raise RuntimeError(
                "loader processes have begun, and do not know a lane that is built now: build all lanes first."
            )
        self._sources.append(source)
        self._ahead.readers.append(_Reader())
        return len(self._sources) - 1

    def expect(self, reader: int, first: Sequence[int], then: int) -> None:
        """Forget what was expected of a reader, and read other records ahead.

        Args:
            reader: Number of the source.
            first: Records that will be needed first, in about this order.
            then: The record from which all will be needed, in order.
        """
        self._ahead.readers[reader] = _Reader(first, then)

    def rest(self, seed: int) -> None:
        """Let loader processes end, or wait if they are persistent; the next record that is taken starts them.

        Args:
            seed: Of the seeds of loader processes from now on.
        """
        self._answers = None
        self._ahead.forget_requests()
        self._seeds.manual_seed(seed)

    def adapt(self, num_records: int, num_microbatches: int) -> None:
        """Tell how many records some microbatches took, so that requests ask for as many as one does."""
        self._ahead.adapt(num_records, num_microbatches)

    # `Any`: records are of any type.
    def take(self, reader: int, number: int) -> Any:  # noqa: ANN401
        """Return a record, and wait for it if it is not there yet.

        Raises:
            SampleError: The dataset raised; names sample and position.
            RuntimeError: A loader process died or took too long; names the first record that is missing.
        """
        ahead = self._ahead
        ahead.demand(reader, number)
        waiting = ahead.readers[reader].waiting
        while (record := waiting.get(number, _MISSING)) is _MISSING:
            self._receive()
        del waiting[number]
        if isinstance(record, SampleError):
            raise record
        self.num_taken += 1
        return record

    def _receive(self) -> None:
        try:
            if self._answers is None:
                if self._loader is None:
                    self._loader = ItemLoader(
                        _Records(self._sources), self._ahead, self._options, self._seeds, is_copied=True
                    )
                self._answers = iter(self._loader)
            answer = next(self._answers)
        except BaseException as error:
            request = next(iter(self._ahead.under_way), None)
            self._answers = None
            self._ahead.forget_requests()
            if request is None or not isinstance(error, RuntimeError):
                raise
            waited_for = self._sources[request.reader].describe(request.numbers[0])
            raise loader_failure("in a lane", waited_for, error) from error
        self._ahead.accept(answer)


class _Request(NamedTuple):
    """Asks for records of one reader. It travels to loader processes."""

    reader: int
    numbers: list[int]


class _Answer(NamedTuple):
    """Holds the records of a request up to the first one that could not be loaded, and why."""

    records: list[Any]
    failure: SampleError | None


class _Records(Dataset[_Answer]):
    """Shows a dataset whose items are the answers to requests. It travels to loader processes."""

    def __init__(self, sources: Sequence[LaneSource]) -> None:
        self._sources = list(sources)

    def __getitem__(self, request: _Request) -> _Answer:
        source = self._sources[request.reader]
        records: list[Any] = []
        for number in request.numbers:
            try:
                records.append(source.load(number))
            except SampleError as error:
                # The cause does not travel, but notes do.
                error.add_note("".join(traceback.format_exception(error.__cause__)))
                return _Answer(records, error)
        return _Answer(records, None)


_MISSING: Any = object()
"""Stands for a record that has been requested."""


class _Reader:
    """Knows which records of a source have been requested, and which will be needed next."""

    def __init__(self, first: Iterable[int] = (), then: int = 0) -> None:
        self._first = deque(first)
        self._then = then
        self.waiting: dict[int, Any] = {}
        """Records that have been requested and were not taken, in the order of requests; or why they could not be loaded."""

    def demand(self, number: int) -> bool:
        """Expect a record as the next one, and return whether it has yet to be requested."""
        if number in self.waiting:
            return False
        if number in self._first:
            self._first.remove(number)
        elif number == self._then:
            self._then += 1
        else:
            # Whoever asks for what nobody expects goes on from there.
            self.waiting.clear()
            self._first.clear()
            self._then = number + 1
        self._first.appendleft(number)
        return True

    def request(self, size: int) -> list[int]:
        """Return the records to request next."""
        numbers = [self._first.popleft() for _ in range(min(size, len(self._first)))]
        rest = size - len(numbers)
        numbers.extend(range(self._then, self._then + rest))
        self._then += rest
        self.waiting.update(dict.fromkeys(numbers, _MISSING))
        return numbers

    def accept(self, number: int, record: Any) -> None:  # noqa: ANN401
        """Keep a record until it is taken, if it is still expected."""
        if number in self.waiting:
            self.waiting[number] = record

    def forget(self, numbers: Iterable[int]) -> None:
        """Request records once more which were not taken."""
        again = [number for number in numbers if number in self.waiting]
        for number in again:
            del self.waiting[number]
        self._first.extendleft(reversed(again))


class _Ahead(Sampler[_Request]):
    """Says what loader processes load next, and keeps what they have loaded; stays in the process that trains.

    See [Note: which records are read ahead]. As for [Note: the loader must not refer to the stream].
    """

    def __init__(self) -> None:
        self.readers: list[_Reader] = []
        self.under_way: deque[_Request] = deque()
        """Requests that were not answered, in the order in which answers come."""
        self._urgent: int | None = None
        self._num_records = 0
        self._num_microbatches = 0

    @property
    def _size(self) -> int:
        """Records of a request."""
        return max(1, -(-self._num_records // max(1, self._num_microbatches)))

    def adapt(self, num_records: int, num_microbatches: int) -> None:
        """Count what microbatches are made of."""
        self._num_records += num_records
        self._num_microbatches += num_microbatches

    def demand(self, reader: int, number: int) -> None:
        """Let a record be requested next, unless it has been requested."""
        if self.readers[reader].demand(number):
            self._urgent = reader

    def __iter__(self) -> Iterator[_Request]:
        while True:
            reader, self._urgent = self._urgent, None
            if reader is None:
                reader = min(range(len(self.readers)), key=lambda index: len(self.readers[index].waiting))
            request = _Request(reader, self.readers[reader].request(self._size))
            self.under_way.append(request)
            yield request

    def accept(self, answer: _Answer) -> None:
        """Keep the records that the first request under way has asked for."""
        request = self.under_way.popleft()
        reader = self.readers[request.reader]
        for number, record in zip(request.numbers, answer.records, strict=False):
            reader.accept(number, record)
        if answer.failure is not None:
            failed, *others = request.numbers[len(answer.records) :]
            # Told when it is asked for, as if it had been loaded only then.
            reader.accept(failed, answer.failure)
            reader.forget(others)

    def forget_requests(self) -> None:
        """Expect nothing of loader processes any more, and request all that was not taken once more."""
        self.under_way.clear()
        self._urgent = None
        for reader in self.readers:
            reader.forget(list(reader.waiting))
