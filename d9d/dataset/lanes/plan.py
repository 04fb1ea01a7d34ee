"""The whole run as numbers: which samples every step, microbatch and rank reads, known to all of them in closed form."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from d9d.dataset.lanes.order import SampleOrder, Tail
from d9d.dataset.lanes.schedule import BatchSchedule

__all__ = ["MAX_LISTED", "DataPlan", "divisors", "listed"]

MAX_LISTED = 12
_MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """Places the samples of a run into steps, microbatches, lanes and ranks.

    [Note: microbatches do not depend on the number of ranks]
    A step that starts at position c reads positions c to c + G, G being its global batch size. Its microbatch k reads the
    k-th run of b positions of these, b being the microbatch size; there are M = G / b. The microbatches are divided into
    L lanes of M / L neighbours, and the lanes over D data-parallel ranks, L / D neighbours each. So content and order of
    every microbatch follow from (c, k) alone: the same for every D that divides L. Ranks that differ in other dimensions
    of the mesh only must be given the same data-parallel rank.

    [Note: short steps]
    With `Tail.short`, the last step of an epoch may hold fewer than G samples. They fill microbatches as always, q of them,
    the last of which may be smaller. Each rank takes ceil(q / D) neighbours of these instead of M / D. Where D does not
    divide q, the last ranks have nothing left to take, but ranks must run equally many microbatches: they run an
    `IdleMicrobatch`, which repeats the last one and counts for nothing. So all samples are read once for any D, in
    microbatches that are the same for any D, and no step is longer than it has to be.

    A plan is a few numbers, the same on every rank: all of them know the end of the data without asking each other.

    Attributes:
        num_samples: Samples of the dataset, N.
        schedule: Global batch size of each step, and steps to jump over.
        microbatch_size: Samples per microbatch; divides all global batch sizes.
        num_lanes: Divides the number of microbatches of all steps. Default 0: the largest that does, which allows most
            numbers of ranks.
        seed: Seed of the shuffle and of random numbers within samples.
        shuffle: Draw another order for each epoch.
        tail: What happens to samples at the end of an epoch that do not fill a global batch. All but `wrap` need one
            global batch size for all steps.
        is_chunked: Let each lane read a block of neighbours, as [Note: chunks] says. Not with `wrap`, whose epochs do not
            end with a step.
        num_epochs: Passes over the data until the end, or None to go on for ever. What does not fill a last global batch
            of the last epoch is left out, except with `Tail.pad` and `Tail.short`.
        first_step: First step that this run does; earlier ones, of a run that it continues, need not fit its sizes.

    Raises:
        ValueError: On creation; names all problems.
    """

    num_samples: int
    schedule: BatchSchedule
    microbatch_size: int
    num_lanes: int = 0
    seed: int = 0
    shuffle: bool = True
    tail: Tail = Tail.wrap
    is_chunked: bool = False
    num_epochs: int | None = 1
    first_step: int = 0
    order: SampleOrder = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = _value_problems(self) or [*_size_problems(self), *_tail_problems(self)]
        if problems:
            raise ValueError(" ".join(problems))
        if self.num_lanes == 0:
            object.__setattr__(self, "num_lanes", self._most_lanes())
        object.__setattr__(self, "order", self._build_order())
        if self.total_steps == 0:
            raise ValueError(self._too_small())

    def _build_order(self) -> SampleOrder:
        return SampleOrder(
            num_samples=self.num_samples,
            seed=self.seed,
            shuffle=self.shuffle,
            tail=self.tail,
            global_batch_size=self.schedule.global_batch_size(0),
            num_chunks=self.num_chunks,
        )

    def _most_lanes(self) -> int:
        sizes = self.schedule.ramp_from(self.first_step)
        return math.gcd(*(point.global_batch_size // self.microbatch_size for point in sizes))

    def _too_small(self) -> str:
        sizes = ", ".join(str(point.global_batch_size) for point in self.schedule.ramp)
        return (
            f"the run has no step: {self.num_samples} samples in {self.num_epochs} epochs do not fill one global batch "
            f"(global_batch_size {sizes}; {len(self.schedule.skips)} ranges to skip). Lower global_batch_size, raise "
            "num_epochs, or set tail to 'short' or 'pad'."
        )

    @property
    def total_steps(self) -> int | None:
        """Number of steps of all epochs, or None if the run never ends."""
        if self.num_epochs is None:
            return None
        return self.schedule.num_steps(self.num_epochs * self.order.epoch_length)

    @property
    def num_chunks(self) -> int:
        """Number of blocks that are read in parallel, or 0. See [Note: chunks]."""
        return self.num_lanes if self.is_chunked else 0

    @property
    def valid_dp_sizes(self) -> list[int]:
        """Numbers of data-parallel ranks that this run can start or resume on: the divisors of the number of lanes."""
        return divisors(self.num_lanes)

    def dp_problems(self, dp_size: int) -> list[str]:
        """Return why the run cannot be dealt out to a number of data-parallel ranks, if it cannot."""
        if dp_size >= 1 and self.num_lanes % dp_size == 0:
            return []
        problem = f"the data-parallel size ({dp_size}) does not divide the number of lanes ({self.num_lanes})."
        return [f"{problem} Use {listed(self.valid_dp_sizes)}."]

    def num_microbatches(self, step: int, dp_size: int) -> int:
        """Return how many microbatches each of `dp_size` ranks runs in a step, idle ones included."""
        return -(-self._num_microbatches_of_all(step) // dp_size)

    def _num_microbatches_of_all(self, step: int) -> int:
        size = self.schedule.global_batch_size(step)
        return -(-self.order.num_read(self.schedule.start(step), size) // self.microbatch_size)

    def microbatch_starts(self, step: int, dp_size: int, dp_rank: int) -> range:
        """Return the first position of each microbatch that a rank runs in a step, in order.

        In a short step, those behind the samples of the epoch are idle.

        Args:
            step: Zero-based step of the run.
            dp_size: Number of data-parallel ranks; divides the number of lanes.
            dp_rank: Index of the rank among them.

        Raises:
            ValueError: There is no such rank, or the number of ranks does not divide the number of lanes.
        """
        problems = self.dp_problems(dp_size)
        if not problems and not 0 <= dp_rank < dp_size:
            problems = [f"dp_rank ({dp_rank}) must be from 0 to {dp_size - 1}."]
        if problems:
            raise ValueError(" ".join(problems))
        per_rank = self.num_microbatches(step, dp_size) * self.microbatch_size
        first = self.schedule.start(step) + dp_rank * per_rank
        return range(first, first + per_rank, self.microbatch_size)

    def num_short_steps(self, num_steps: int) -> int:
        """Return how many of the first steps of the run are short. See [Note: short steps]."""
        if not self.order.num_in_short_step:
            return 0
        size = self.schedule.global_batch_size(0)
        per_epoch = self.order.epoch_length // size
        stretches = self.schedule.stretches(num_steps)
        firsts = [stretch.first_position // size for stretch in stretches]
        ends = [first + stretch.num_steps for first, stretch in zip(firsts, stretches, strict=True)]
        return sum(end // per_epoch - first // per_epoch for first, end in zip(firsts, ends, strict=True))

    def num_samples_of(self, num_steps: int) -> int:
        """Return how many samples the first steps of the run read over all ranks, padding included."""
        of_whole_steps = sum(
            stretch.num_steps * stretch.global_batch_size for stretch in self.schedule.stretches(num_steps)
        )
        missing = self.schedule.global_batch_size(0) - self.order.num_in_short_step
        return of_whole_steps - self.num_short_steps(num_steps) * missing

    def num_read(self, step: int, dp_size: int, dp_rank: int) -> int:
        """Return how many samples a rank reads in a step, idle microbatches left out. Earlier ranks never read less."""
        starts = self.microbatch_starts(step, dp_size, dp_rank)
        return sum(self.order.num_read(start, self.microbatch_size) for start in starts)

    def step_samples(self, step: int) -> npt.NDArray[np.int64]:
        """Return the samples of a step over all ranks, in order of microbatches.

        Shapes:
            Result (M, B), with M counting microbatches that are not idle. -1 fills up a last one that is smaller.
        """
        start, size = self.schedule.start(step), self.schedule.global_batch_size(step)
        num_read = self.order.num_read(start, size)
        samples = np.full(self._num_microbatches_of_all(step) * self.microbatch_size, -1, dtype=np.int64)  # (M * B,)
        samples[:num_read] = self.order.samples(np.arange(start, start + num_read, dtype=np.int64))
        return samples.reshape(-1, self.microbatch_size)  # (M, B)

    def resumed_from(self, history: BatchSchedule, num_steps: int) -> "DataPlan":
        """Return the plan of a run that did its first steps by another schedule, and the rest by this one.

        Raises:
            ValueError: The lanes do not fit the steps to come.
        """
        schedule = self.schedule.resumed_from(history, num_steps)
        return dataclasses.replace(self, schedule=schedule, first_step=num_steps)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _value_problems(plan: DataPlan) -> list[str]:
    problems = [
        f"{name} ({value}) must be at least {least}."
        for name, value, least in (
            ("num_samples", plan.num_samples, 1),
            ("microbatch_size", plan.microbatch_size, 1),
            ("num_lanes", plan.num_lanes, 0),
            ("num_epochs", 1 if plan.num_epochs is None else plan.num_epochs, 1),
        )
        if value < least
    ]
    if not 0 <= plan.seed <= _MAX_SEED:
        problems.append(f"seed ({plan.seed}) must be from 0 to 2**63 - 1.")
    return problems


def _size_problems(plan: DataPlan) -> list[str]:
    problems: list[str] = []
    micro, lanes = plan.microbatch_size, plan.num_lanes
    for step, size in plan.schedule.ramp_from(plan.first_step):
        where = "" if plan.schedule.is_constant else f" from step {step + 1}"
        if size % micro:
            problems.append(
                f"global_batch_size ({size}){where} is not a multiple of microbatch_size ({micro}). "
                f"Use {_neighbours(size, micro)}."
            )
        elif lanes and size // micro % lanes:
            problems.append(
                f"lanes ({lanes}) does not divide the {size // micro} microbatches per step{where} "
                f"(global_batch_size {size} / microbatch_size {micro}). Use {listed(divisors(size // micro))}."
            )
    return problems


def _tail_problems(plan: DataPlan) -> list[str]:
    problems: list[str] = []
    size = plan.schedule.global_batch_size(0)
    if plan.tail is Tail.wrap and plan.is_chunked:
        problems.append("chunks need epochs that end with a step: set tail to 'drop', 'short' or 'pad', not 'wrap'.")
    if plan.tail is not Tail.wrap and not plan.schedule.is_constant:
        problems.append(
            f"a ramp of the global batch size needs tail 'wrap', not {plan.tail.value!r}, whose epochs end with a step."
        )
    elif plan.tail is Tail.drop and plan.num_samples < size:
        problems.append(
            f"the dataset has {plan.num_samples} samples, fewer than one global batch (global_batch_size {size}): "
            "lower global_batch_size, or set tail to 'short', 'wrap' or 'pad'."
        )
    return problems


def _neighbours(value: int, unit: int) -> str:
    count = value // unit
    return " or ".join(str(n * unit) for n in (count, count + 1) if n > 0)


def listed(values: Iterable[int]) -> str:
    """Join valid values, the largest ones if they are many."""
    texts = [str(value) for value in values]
    if len(texts) == 1:
        return texts[0]
    if len(texts) <= MAX_LISTED:
        return f"one of {', '.join(texts)}"
    return f"one of {', '.join(texts[-MAX_LISTED:])}, and {len(texts) - MAX_LISTED} smaller ones"
