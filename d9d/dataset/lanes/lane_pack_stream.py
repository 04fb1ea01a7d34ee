"""Packs from lanes that keep a state, the same for any number of ranks."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import CollateFn, MicrobatchPack
from d9d.dataset.lanes.generators import KeptGenerators, may_seed_generators, seed_generators
from d9d.dataset.lanes.lane_stream import LaneStream
from d9d.dataset.lanes.loader_processes import LoaderOptions
from d9d.dataset.lanes.order import Tail
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.record_loading import RecordLoader
from d9d.dataset.lanes.sample_loading import SampleSeeds
from d9d.dataset.lanes.state import LaneState, check_resume
from d9d.dataset.sharded import derive_seed

__all__ = ["ElasticLaneStream"]

LANES_KEY = "lane_states"
"""Key of the states of lanes in the state of a stream: one for each lane of a rank, by its number."""


class ElasticLaneStream(MicrobatchPackStream):
    """Draws the packs of one data-parallel rank from the streams of its lanes.

    In each step, each lane gives the same number of microbatches, and neighbouring lanes belong to one rank, so that
    content and order of all microbatches are the same for any number of ranks that divides the lanes. Elements are made and
    collated where the stream is read, of records that loader processes may load (`loader`). The position is after the last
    pack that was handed out, whatever has been read ahead.

    The state has a key for each lane of this rank. A checkpoint gathers those of all ranks, and each rank finds the keys
    of its lanes there, however many ranks there are. Ranks that share their lanes hold the same values.

    Args:
        build_lane: Builds the stream of a lane from its index, at its start.
        collate_fn: Makes a microbatch from its elements.
        plan: Global batch sizes, counted in elements, microbatch size, lanes and seed; the same on every rank. Its tail
            must be `Tail.wrap`, and it must have no end (`num_epochs=None`). Elements of steps to skip are drawn and dropped.
        dp_size: Number of data-parallel ranks.
        dp_rank: Index of this rank among them.
        total_steps: Number of packs until the stream ends; None for no end.
        fingerprint: Of the dataset, compared at a resume; empty to leave it out.
        recipe: How lanes make their elements of samples, such as sizes of packers; compared at a resume.
        seeds_generators: Whether lanes seed the global generators (`LaneRecords`): then the stream asks to be read on the
            main thread, seeds them for the collate function, too, and puts them back after each pack.
        loader: The one of the `LaneRecords` in the lanes, which reads their records ahead; None if there is none.

    Raises:
        ValueError: The plan cannot be followed; names all problems.
    """

    def __init__(
        self,
        build_lane: Callable[[int], LaneStream[Any]],
        collate_fn: CollateFn,
        plan: DataPlan,
        *,
        dp_size: int,
        dp_rank: int,
        total_steps: int | None = None,
        fingerprint: str = "",
        recipe: str = "",
        seeds_generators: bool = False,
        loader: RecordLoader | None = None,
    ) -> None:
        problems = _problems(plan, dp_size, dp_rank)
        if problems:
            raise ValueError(" ".join(problems))
        lanes_per_rank = plan.num_lanes // dp_size
        first_lane = dp_rank * lanes_per_rank
        self._lanes = {lane: build_lane(lane) for lane in range(first_lane, first_lane + lanes_per_rank)}
        self._collate_fn = collate_fn
        self._configured_plan = plan
        self._plan = plan
        self._total_steps = total_steps
        self._fingerprint = fingerprint
        self._recipe = recipe
        self._seeds_generators = seeds_generators
        self._seeds = SampleSeeds(plan.seed)
        self._generators = KeptGenerators()
        self._loader = loader or RecordLoader(LoaderOptions())
        self._loader.adapt(plan.microbatch_size, 1)  # a guess, until there are microbatches
        self._dp_rank = dp_rank
        self._num_steps = 0
        self._iteration = 0

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell that any number of ranks can resume the state: its keys are lanes, not ranks."""
        return True

    @property
    def needs_main_thread(self) -> bool:
        """Tell whether loading seeds the global generators of this process."""
        return self._seeds_generators

    def num_samples_of(self, num_steps: int) -> int:
        """Return how many elements the first steps of the run hold over all ranks."""
        return self._plan.num_samples_of(num_steps)

    @property
    def total_steps(self) -> int | None:
        """Number of packs until the stream ends, or None."""
        return self._total_steps

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        self._iteration += 1
        iteration = self._iteration
        first, total = self._num_steps, self._total_steps
        seed = derive_seed(self._plan.seed, self._dp_rank, first)
        self._loader.rest(seed)
        try:
            for step in itertools.count(first) if total is None else range(first, total):
                if iteration != self._iteration:
                    raise RuntimeError("this iterator is stale: the stream was moved or iterated anew after it began.")
                pack = self._draw_whole_pack(step)
                self._num_steps = step + 1
                yield pack
        finally:
            if iteration == self._iteration:
                self._loader.rest(seed)

    def _draw_whole_pack(self, step: int) -> MicrobatchPack[Any]:
        before = self._lane_states()
        try:
            if not (self._seeds_generators and may_seed_generators()):
                return self._draw_pack(step)
            with self._generators:
                return self._draw_pack(step)
        except BaseException:
            # Some lanes are ahead now, and a state that is saved after the failure must not be.
            self._load_lane_states(before)
            raise

    def _draw_pack(self, step: int) -> MicrobatchPack[Any]:
        plan, size = self._plan, self._plan.microbatch_size
        seeds = self._seeds_generators and may_seed_generators()
        jump = plan.schedule.start(step) - plan.schedule.consumed(step)
        pack: list[Any] = []
        for lane, stream in self._lanes.items():
            for _ in range(jump // plan.num_lanes):
                # What comes behind is known only when this has been read.
                next(stream)
            num_taken = self._loader.num_taken
            starts = plan.microbatch_starts(step, plan.num_lanes, lane)
            for start in starts:
                elements = [next(stream) for _ in range(size)]
                if seeds:
                    # Whatever has been loaded for these elements: packers keep some, and load them again after a resume.
                    seed_generators(self._seeds.at(start))
                pack.append(self._collate_fn(elements))
            self._loader.adapt(self._loader.num_taken - num_taken, len(starts))
        return tuple(pack)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last pack, and the state of each lane of this rank as JSON text."""
        state: dict[str, Any] = LaneState.of(self._plan, self._num_steps, self._fingerprint, self._recipe).to_dict()
        state[LANES_KEY] = self._lane_states()
        return state

    def _lane_states(self) -> dict[str, str]:
        return {str(lane): json.dumps(stream.state_dict()) for lane, stream in self._lanes.items()}

    def _load_lane_states(self, states: dict[str, str]) -> None:
        for lane, stream in self._lanes.items():
            stream.load_state_dict(json.loads(states[str(lane)]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. It takes effect at the next `iter()`, and ends iterators that run.

        Raises:
            ValueError: The position would mean other elements now, or a lane of this rank is not there.
        """
        saved = LaneState.from_dict(state_dict)
        own = LaneState.of(self._configured_plan, 0, self._fingerprint, self._recipe)
        check_resume(saved, own, lanes_hold_state=True)
        states: dict[str, str] = state_dict[LANES_KEY]
        missing = [lane for lane in self._lanes if str(lane) not in states]
        if missing:
            raise ValueError(
                f"the saved data position has no state for the lanes {missing}, only for {sorted(states)}."
            )
        self._plan = self._configured_plan.resumed_from(saved.schedule, saved.num_steps)
        self._load_lane_states(states)
        self._num_steps = saved.num_steps
        self._iteration += 1


def _problems(plan: DataPlan, dp_size: int, dp_rank: int) -> list[str]:
    problems = plan.dp_problems(dp_size)
    if not 0 <= dp_rank < max(dp_size, 1):
        problems.append(f"dp_rank ({dp_rank}) must be from 0 to {dp_size - 1}.")
    if plan.tail is not Tail.wrap:
        problems.append(f"lanes with a state have no end of an epoch: set tail to 'wrap', not {plan.tail.value!r}.")
    if plan.num_epochs is not None:
        problems.append(
            f"num_epochs ({plan.num_epochs}) cannot be kept, as how many elements come out of an epoch is not known "
            "beforehand: set it to None, and total_steps to the number of steps."
        )
    return problems
