"""Streams that keep a state in each lane, such as packing: what they promise, read from, and how their states travel."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from d9d.dataset.lanes.order import Tail
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.sample_loading import MapDataset, SampleError, SampleSeeds, load_sample

__all__ = ["FixedStateLaneStream", "LaneRecords", "LaneStates", "LaneStream"]

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


@runtime_checkable
class FixedStateLaneStream(Protocol):
    """Describes a stream whose state is a number of integers that never changes."""

    def state_vector(self) -> Sequence[int]:
        """Return the position after the last element."""
        ...

    def load_state_vector(self, values: Sequence[int]) -> None:
        """Continue after a position that `state_vector` returned."""
        ...


class LaneRecords:
    """Loads the records of one lane: record q of lane l is the sample at position q * L + l of the order.

    The lanes together read every sample once per epoch, in epochs without end.

    Args:
        dataset: Map-style dataset.
        plan: Order, seed and number of lanes; its tail must be `Tail.wrap`.
        lane: Index of the lane.

    Raises:
        ValueError: The tail is another one, or there is no such lane.
    """

    def __init__(self, dataset: MapDataset, plan: DataPlan, lane: int) -> None:
        if plan.tail is not Tail.wrap:
            raise ValueError(
                f"lanes with a state read epochs without end: they need tail 'wrap', not {plan.tail.value!r}."
            )
        if not 0 <= lane < plan.num_lanes:
            raise ValueError(f"lane ({lane}) must be from 0 to {plan.num_lanes - 1}.")
        self._dataset = dataset
        self._order = plan.order
        self._seeds = SampleSeeds(plan.seed)
        self._lane = lane
        self._num_lanes = plan.num_lanes

    # `Any`: samples are of any type.
    def __call__(self, number: int) -> Any:  # noqa: ANN401
        """Load a record. Datasets that take seeds (`SeededDataset`) get one; global generators are left alone.

        Raises:
            SampleError: The dataset raised; names sample and position.
        """
        position = number * self._num_lanes + self._lane
        index = self._order.sample(position)
        try:
            return load_sample(self._dataset, index, self._seeds.at(position), seeds_generators=False)
        except Exception as error:
            raise SampleError(
                f"sample {index} of the dataset (position {position} of the run, record {number} of lane {self._lane}) "
                f"could not be loaded: {error!r}"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaneStates:
    """Holds the states of a rank's lanes as rows of one table of all lanes.

    Attributes:
        num_lanes: Lanes of all ranks, L.
        first_lane: First lane of this rank.
        rows: int64 of shape (lanes of this rank, values per lane).
    """

    num_lanes: int
    first_lane: int
    rows: torch.Tensor

    @classmethod
    def of(cls, streams: Sequence[FixedStateLaneStream], num_lanes: int, first_lane: int) -> "LaneStates":
        """Collect the states of a rank's lanes.

        Args:
            streams: Streams of neighbouring lanes, at least one.
            num_lanes: Lanes of all ranks.
            first_lane: Lane of the first stream.

        Raises:
            ValueError: The states are of different lengths, or the lanes are not all there.
        """
        vectors = [list(stream.state_vector()) for stream in streams]
        widths = sorted({len(vector) for vector in vectors})
        if len(widths) != 1:
            raise ValueError(f"the states of the lanes must be of one length, not {widths}.")
        if not 0 <= first_lane <= num_lanes - len(vectors):
            raise ValueError(f"lanes {first_lane} to {first_lane + len(vectors) - 1} are not all below {num_lanes}.")
        return cls(num_lanes=num_lanes, first_lane=first_lane, rows=torch.tensor(vectors, dtype=torch.int64))

    def load_into(self, streams: Sequence[FixedStateLaneStream]) -> None:
        """Move the streams of this rank's lanes to their states.

        Raises:
            ValueError: There are not as many streams as rows.
        """
        if len(streams) != len(self.rows):
            raise ValueError(f"{len(self.rows)} states do not fit {len(streams)} streams.")
        for stream, values in zip(streams, self.rows.tolist(), strict=True):
            stream.load_state_vector(values)

    def as_dtensor(self, mesh: DeviceMesh, dp_axes: Sequence[str]) -> DTensor:
        """Return the table of all lanes, sharded over the data-parallel axes and replicated over the others.

        A distributed checkpoint then saves each row once and loads it for any number of ranks. Communicates nothing.

        Shapes:
            Result (L, values per lane), int64, `Shard(0)` over `dp_axes`.

        Args:
            mesh: Mesh whose axes are named.
            dp_axes: Axes that divide the lanes, outermost first, as in the data-parallel rank.

        Raises:
            ValueError: The mesh lacks an axis, or does not divide the lanes as this rank holds them.
        """
        names = mesh.mesh_dim_names or ()
        missing = [axis for axis in dp_axes if axis not in names]
        if missing:
            raise ValueError(f"the mesh has no axes {missing}; it has {list(names)}.")
        num_ranks, rank = 1, 0
        for axis in dp_axes:
            size = mesh[axis].size()
            num_ranks, rank = num_ranks * size, rank * size + mesh.get_local_rank(axis)
        if len(self.rows) * num_ranks != self.num_lanes or self.first_lane != rank * len(self.rows):
            raise ValueError(
                f"{list(dp_axes)} give this rank part {rank} of {num_ranks} of {self.num_lanes} lanes, but it holds "
                f"{len(self.rows)} from lane {self.first_lane} on."
            )
        placements: list[Placement] = [Shard(0) if name in dp_axes else Replicate() for name in names]
        shape = torch.Size((self.num_lanes, self.rows.shape[1]))
        return DTensor.from_local(
            self.rows, mesh, placements, run_check=False, shape=shape, stride=(self.rows.shape[1], 1)
        )
