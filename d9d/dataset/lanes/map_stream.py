"""Packs from a map-style dataset that are the same for any number of ranks, and that can be resumed at any step."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import Sampler

from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import CollateFn, MicrobatchPack
from d9d.dataset.lanes.generators import KeptGenerators, may_seed_generators
from d9d.dataset.lanes.loader_processes import ItemLoader, LoaderOptions, loader_failure
from d9d.dataset.lanes.microbatch_loading import (
    AttachWeights,
    MicrobatchLoader,
    MicrobatchRequest,
    describe_request,
    microbatch_requests,
)
from d9d.dataset.lanes.order import Tail
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.sample_loading import MapDataset, SampleError, SampleSeeds
from d9d.dataset.lanes.state import LaneState, check_resume
from d9d.dataset.sharded import dataset_length, derive_seed

__all__ = ["ElasticMapStream"]

_DATASET_KEY = "dataset"
_NUM_DIGEST_BYTES = 7
_AS_THEY_ARE = contextlib.nullcontext()


class ElasticMapStream(MicrobatchPackStream):
    """Loads the packs of one data-parallel rank by a plan, from any step on.

    Microbatches, random numbers within samples included, are the same in content and order for any number of ranks that
    divides the lanes and any number of loader processes, before and after a resume. The state counts packs that were
    handed out, not what loader processes have read ahead, and moving to a state loads nothing.

    [Note: random numbers within samples]
    A dataset that takes seeds (`SeededDataset`) gets one for each sample that follows from the seed of the plan and the
    position. Besides, the global CPU generators of PyTorch, NumPy and Python are seeded with that of its first position
    before each microbatch is loaded and collated; those of NumPy and Python from the first one on that draws from them,
    which is loaded twice unless the dataset has a state ([Note: seeding only what draws]). In the process that trains
    (num_workers 0), they are put back after each pack, so that training does not notice. That works on the main thread only,
    which may draw from them at any moment: such a stream asks to be read there (`needs_main_thread`), and a thread that
    reads it leaves the generators alone.

    In the short last step of an epoch (`Tail.short`), packs may hold an `IdleMicrobatch`. See [Note: short steps].

    Args:
        dataset: Map-style dataset with as many samples as the plan says; the same on every rank.
        collate_fn: Makes a microbatch from its samples.
        plan: Places samples into steps, microbatches and ranks; the same on every rank.
        dp_size: Number of data-parallel ranks.
        dp_rank: Index of this rank among them. Ranks that differ in other dimensions of the mesh only share one.
        loader: How to load.
        fingerprint: Of the dataset (`dataset_fingerprint`), compared at a resume; empty to leave it out.
        recipe: How the dataset makes its samples of others, such as the weights of a mixture; compared at a resume.
        attach_weights: Puts the weights of samples into microbatches, such as `add_weights`; needed for `Tail.pad`.
        seeds_generators: Whether to seed the global generators for each microbatch. Where neither dataset nor collate
            function draw from them, turning it off lets other threads read the stream.

    Raises:
        ValueError: The plan does not fit the dataset or the ranks; names all problems.
        TypeError: The dataset has no length.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: CollateFn,
        plan: DataPlan,
        *,
        dp_size: int,
        dp_rank: int,
        loader: LoaderOptions | None = None,
        fingerprint: str = "",
        recipe: str = "",
        attach_weights: AttachWeights | None = None,
        seeds_generators: bool = True,
    ) -> None:
        problems = _problems(dataset_length(dataset), plan, dp_size, dp_rank, attach_weights)
        if problems:
            raise ValueError(" ".join(problems))
        self._dataset = dataset
        self._configured_plan = plan
        self._place = _Place(plan, dp_size, dp_rank)
        self._fingerprint = fingerprint
        self._recipe = recipe
        self._iteration = 0
        options = loader or LoaderOptions()
        self._disturbs_generators = options.num_workers == 0 and seeds_generators
        self._generators = KeptGenerators()
        self._worker_seeds = torch.Generator()
        generators = self._generators if seeds_generators else None
        microbatches = MicrobatchLoader(
            dataset, collate_fn, plan.order, SampleSeeds(plan.seed), attach_weights, generators
        )
        self._microbatches = _build_loader(microbatches, self._place, options, self._worker_seeds)

    @property
    def plan(self) -> DataPlan:
        """Plan of the run; after a resume, with the sizes of the steps that were done as they were then."""
        return self._place.plan

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell that the state is the same on every rank."""
        return True

    def num_samples_of(self, num_steps: int) -> int:
        """Return how many samples the first steps of the run hold over all ranks."""
        return self._place.plan.num_samples_of(num_steps)

    @property
    def needs_main_thread(self) -> bool:
        """Tell whether loading seeds the global generators of this process. See [Note: random numbers within samples]."""
        return self._disturbs_generators

    @property
    def total_steps(self) -> int | None:
        """Number of packs of all epochs, or None if the stream never ends."""
        return self._place.plan.total_steps

    def remaining_requests(self) -> Iterator[MicrobatchRequest]:
        """Yield what this rank reads from the current position on, without loading it."""
        return iter(self._place)

    def sample_digest(self, step: int) -> int:
        """Return a number of 56 bits that changes with the samples of this rank in a step, or with their order.

        Args:
            step: Zero-based step of the run.
        """
        digest = hashlib.blake2b(digest_size=_NUM_DIGEST_BYTES)
        for request in self._place.requests([step]):
            digest.update(np.array([request.start, len(request.samples), *request.samples], dtype="<i8").tobytes())
        return int.from_bytes(digest.digest(), "little")

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        self._iteration += 1
        iteration = self._iteration
        place = self._place
        # Only what is drawn beside the seeds of samples depends on these, such as with `seeds_generators` off.
        self._worker_seeds.manual_seed(derive_seed(place.plan.seed, place.dp_rank, place.num_steps))
        microbatches = iter(self._microbatches)
        for step in place.remaining_steps():
            if iteration != self._iteration:
                raise RuntimeError("this iterator is stale: the stream was moved or iterated anew after it began.")
            with self._generators if self._disturbs_generators and may_seed_generators() else _AS_THEY_ARE:
                pack = self._load_pack(microbatches, step)
            place.num_steps = step + 1
            yield pack

    def _load_pack(self, microbatches: Iterator[Any], step: int) -> MicrobatchPack[Any]:
        num_microbatches = self._place.plan.num_microbatches(step, self._place.dp_size)
        pack: list[Any] = []
        try:
            # Not `tuple()` at once: how many have come tells which one is missing.
            pack.extend(itertools.islice(microbatches, num_microbatches))
        except SampleError:
            raise
        except RuntimeError as error:
            missing = next(itertools.islice(self._place.requests([step]), len(pack), None))
            where = f"in step {step + 1} of data-parallel rank {self._place.dp_rank}"
            raise loader_failure(where, describe_request(missing), error) from error
        return tuple(pack)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last pack that was handed out; the same on all ranks."""
        place = self._place
        state: dict[str, Any] = LaneState.of(place.plan, place.num_steps, self._fingerprint, self._recipe).to_dict()
        if isinstance(self._dataset, Stateful):
            state[_DATASET_KEY] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. It takes effect at the next `iter()`, and ends iterators that run.

        Steps that were done keep their batch sizes and skips; those to come follow the plan that was configured.

        Raises:
            ValueError: The position would mean other samples now; names each value that differs.
        """
        saved = LaneState.from_dict(state_dict)
        check_resume(saved, LaneState.of(self._configured_plan, 0, self._fingerprint, self._recipe))
        plan = self._configured_plan.resumed_from(saved.schedule, saved.num_steps)
        if isinstance(self._dataset, Stateful):
            self._dataset.load_state_dict(state_dict[_DATASET_KEY])
        self._place.plan = plan
        self._place.num_steps = saved.num_steps
        self._iteration += 1


def _problems(
    num_samples: int, plan: DataPlan, dp_size: int, dp_rank: int, attach_weights: AttachWeights | None
) -> list[str]:
    problems = plan.dp_problems(dp_size)
    if not 0 <= dp_rank < max(dp_size, 1):
        problems.append(f"dp_rank ({dp_rank}) must be from 0 to {dp_size - 1}.")
    if num_samples != plan.num_samples:
        problems.append(f"the dataset has {num_samples} samples, but the plan is for {plan.num_samples}.")
    if plan.tail is Tail.pad and attach_weights is None:
        problems.append(
            "tail 'pad' repeats samples that must weigh nothing, but nobody tells the task: give attach_weights, such as "
            "add_weights for microbatches that are dicts."
        )
    return problems


def _build_loader(
    microbatches: MicrobatchLoader, place: "_Place", options: LoaderOptions, seeds: torch.Generator
) -> Iterable[Any]:
    if options.num_workers == 0 and not options.pin_memory:
        return _DirectLoader(microbatches, place)
    return ItemLoader(microbatches, place, options, seeds)


class _DirectLoader:
    """Loads where it is read, without what PyTorch's loader does around each item: that takes longer than small samples."""

    def __init__(self, microbatches: MicrobatchLoader, place: "_Place") -> None:
        self._microbatches = microbatches
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        return map(self._microbatches.__getitem__, self._place)


class _Place(Sampler[MicrobatchRequest]):
    """Knows how far one rank has come, and yields what is left to read; stays in the process that trains.

    [Note: the loader must not refer to the stream]
    Objects that refer to each other in a circle are freed by the garbage collector, which closes the queues of loader
    processes before the loader can tell them to end: it then waits 5 seconds for each (torch 2.13). So the stream and the
    loader both refer to this object, and it refers to neither.
    """

    def __init__(self, plan: DataPlan, dp_size: int, dp_rank: int) -> None:
        self.plan = plan
        self.dp_size = dp_size
        self.dp_rank = dp_rank
        self.num_steps = 0
        """Steps whose packs were handed out."""

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps from here to the end."""
        first, total = self.num_steps, self.plan.total_steps
        return itertools.count(first) if total is None else iter(range(first, total))

    def microbatch_starts(self, step: int) -> range:
        """Return the first position of each microbatch of this rank."""
        return self.plan.microbatch_starts(step, self.dp_size, self.dp_rank)

    def requests(self, steps: Iterable[int]) -> Iterator[MicrobatchRequest]:
        """Yield what this rank reads in some steps."""
        plan = self.plan
        starts = itertools.chain.from_iterable(map(self.microbatch_starts, steps))
        return microbatch_requests(plan.order, starts, plan.microbatch_size, plan.num_samples)

    def __iter__(self) -> Iterator[MicrobatchRequest]:
        return self.requests(self.remaining_steps())
