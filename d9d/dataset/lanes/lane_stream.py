"""Streams that keep a state in each lane, such as packing: what they promise, and what they read from."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from d9d.dataset.lanes.order import Tail
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.record_loading import LaneSource, RecordLoader
from d9d.dataset.lanes.sample_loading import MapDataset

__all__ = ["LaneRecords", "LaneStream"]

T_co = TypeVar("T_co", covariant=True)


class LaneStream(Protocol[T_co]):
    """Describes the endless stream of elements of one lane, which depends on nothing but the lane and its state."""

    def __next__(self) -> T_co:
        """Return the next element. If it fails, asking again goes on where it was."""
        ...

    # `Any`: whatever JSON can hold.
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last element, as numbers, strings, lists and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after a position that `state_dict` returned."""
        ...


class LaneRecords:
    """Loads the records of one lane: record q of lane l is the sample at position q * L + l of the order.

    The lanes together read every sample once per epoch, in epochs without end.

    Args:
        dataset: Map-style dataset.
        plan: Order, seed and number of lanes; its tail must be `Tail.wrap`.
        lane: Index of the lane.
        seeds_generators: Seed the global generators before each record, where that disturbs no other thread. They are left
            where loading leaves them; `ElasticLaneStream` puts them back.
        loader: Loads them ahead in loader processes; shared by all lanes of the rank. None: load when they are asked for.

    Raises:
        ValueError: The tail is another one, or there is no such lane.
    """

    def __init__(
        self,
        dataset: MapDataset,
        plan: DataPlan,
        lane: int,
        *,
        seeds_generators: bool = False,
        loader: RecordLoader | None = None,
    ) -> None:
        if plan.tail is not Tail.wrap:
            raise ValueError(
                f"lanes with a state read epochs without end: they need tail 'wrap', not {plan.tail.value!r}."
            )
        if not 0 <= lane < plan.num_lanes:
            raise ValueError(f"lane ({lane}) must be from 0 to {plan.num_lanes - 1}.")
        self._source = LaneSource(dataset, plan, lane, seeds_generators=seeds_generators)
        self._loader = loader if loader is not None and loader.has_workers else None
        self._reader = self._loader.add(self._source) if self._loader is not None else 0

    # `Any`: samples are of any type.
    def __call__(self, number: int) -> Any:  # noqa: ANN401
        """Load a record. Datasets that take seeds (`SeededDataset`) get one.

        Raises:
            SampleError: The dataset raised; names sample and position.
            RuntimeError: A loader process died; names a sample that it should have loaded.
        """
        return self._source.load(number) if self._loader is None else self._loader.take(self._reader, number)

    def expect(self, first: Sequence[int], then: int) -> None:
        """Tell which records come next, to have those read ahead. Without that, all of them are expected in order.

        Args:
            first: Those that are needed first, in about this order.
            then: The record from which all are needed.
        """
        if self._loader is not None:
            self._loader.expect(self._reader, first, then)
