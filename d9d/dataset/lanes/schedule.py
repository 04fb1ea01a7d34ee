"""Where each step starts in the order of samples: global batch sizes that grow, and steps that are jumped over.

Step indices count from 0; messages count steps from 1, as logs and checkpoints of a job do.
"""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Self

__all__ = ["BatchSchedule", "RampPoint", "StepRange", "Stretch"]


class RampPoint(NamedTuple):
    """Sets the global batch size from a step on."""

    from_step: int
    """Zero-based step."""
    global_batch_size: int
    """Samples per step over all ranks."""

    def __str__(self) -> str:
        return f"{self.global_batch_size} from step {self.from_step + 1}"


class StepRange(NamedTuple):
    """Names steps, from `start` up to but not including `stop`.

    As steps to skip: step `start` reads what step `stop` would have read without this range. Numbers are those of the run
    that showed the loss spike, so ranges that were skipped before are counted as they were then.
    """

    start: int
    """Zero-based first step."""
    stop: int
    """The step after the last one."""

    def __str__(self) -> str:
        return f"steps {self.start + 1} to {self.stop}"


class Stretch(NamedTuple):
    """Steps of one size that read all positions from the first one on."""

    first_position: int
    global_batch_size: int
    num_steps: int


class _Segment(NamedTuple):
    """Where a stretch begins."""

    first_step: int
    first_position: int
    global_batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """Tells the positions that each step reads, in closed form.

    Attributes:
        ramp: Global batch sizes; the first point is at step 0, and steps increase.
        skips: Steps to jump over, with increasing first steps. A jump takes the batch size of the step that it starts at.

    Raises:
        ValueError: On creation; names all problems.
    """

    ramp: tuple[RampPoint, ...]
    skips: tuple[StepRange, ...] = ()
    _segments: tuple[_Segment, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = [*_ramp_problems(self.ramp), *_skip_problems(self.skips)]
        if problems:
            raise ValueError(" ".join(problems))
        object.__setattr__(self, "_segments", _segments(self.ramp, self.skips))

    @classmethod
    def constant(cls, global_batch_size: int) -> Self:
        """Build a schedule of steps of one size."""
        return cls(ramp=(RampPoint(0, global_batch_size),))

    @property
    def is_constant(self) -> bool:
        """Tell whether all steps have the same size."""
        return len(self.ramp) == 1

    def global_batch_size(self, step: int) -> int:
        """Return the number of samples of a step over all ranks."""
        return self._segment(step).global_batch_size

    def start(self, step: int) -> int:
        """Return the first position that a step reads, after all jumps up to it."""
        segment = self._segment(step)
        return segment.first_position + (step - segment.first_step) * segment.global_batch_size

    def consumed(self, num_steps: int) -> int:
        """Return how far the first steps of the run have come: the position behind the last of them.

        Samples that were jumped over count. A jump at step `num_steps` is still ahead.
        """
        return 0 if num_steps == 0 else self.start(num_steps - 1) + self.global_batch_size(num_steps - 1)

    def num_steps(self, num_positions: int) -> int:
        """Return how many steps read within the first positions of the run."""
        num_fitting = 0
        for index, segment in enumerate(self._segments):
            fitting = max(0, (num_positions - segment.first_position) // segment.global_batch_size)
            is_last = index + 1 == len(self._segments)
            length = fitting if is_last else self._segments[index + 1].first_step - segment.first_step
            num_fitting += min(fitting, length)
            if fitting < length:
                break
        return num_fitting

    def stretches(self, num_steps: int) -> list[Stretch]:
        """Return the first steps of the run, cut where their size changes and where steps are jumped over.

        Args:
            num_steps: Number of these steps.
        """
        stops = [segment.first_step for segment in self._segments[1:]]
        return [
            Stretch(segment.first_position, segment.global_batch_size, min(stop, num_steps) - segment.first_step)
            for segment, stop in zip(self._segments, [*stops, num_steps], strict=True)
            if segment.first_step < num_steps
        ]

    def ramp_from(self, step: int) -> list[RampPoint]:
        """Return the points of the ramp that are in force at a step or later."""
        return [
            point
            for index, point in enumerate(self.ramp)
            if index + 1 == len(self.ramp) or self.ramp[index + 1].from_step > step
        ]

    def resumed_from(self, history: "BatchSchedule", num_steps: int) -> "BatchSchedule":
        """Return the schedule of a run that did its first steps by another schedule, and the rest by this one.

        Args:
            history: Schedule of the steps that were done.
            num_steps: Number of steps that were done.
        """
        ramp = [point for point in history.ramp if point.from_step < num_steps]
        now = self.global_batch_size(num_steps)
        if not ramp or ramp[-1].global_batch_size != now:
            ramp.append(RampPoint(num_steps, now))
        ramp.extend(point for point in self.ramp if point.from_step > num_steps)
        skips = [skip for skip in history.skips if skip.start < num_steps]
        skips.extend(skip for skip in self.skips if skip.start >= num_steps)
        return BatchSchedule(ramp=tuple(ramp), skips=tuple(skips))

    def _segment(self, step: int) -> _Segment:
        if step < 0:
            raise IndexError(f"step {step} is before the start of the run.")
        return self._segments[bisect_right(self._segments, step, key=lambda segment: segment.first_step) - 1]


def _segments(ramp: Sequence[RampPoint], skips: Sequence[StepRange]) -> tuple[_Segment, ...]:
    sizes, jumps = dict(ramp), {skip.start: skip.stop - skip.start for skip in skips}
    segments: list[_Segment] = []
    size, position, last_step = ramp[0].global_batch_size, 0, 0
    for step in sorted({*sizes, *jumps}):
        position += (step - last_step) * size
        size = sizes.get(step, size)
        position += jumps.get(step, 0) * size
        segments.append(_Segment(step, position, size))
        last_step = step
    return tuple(segments)


def _ramp_problems(ramp: Sequence[RampPoint]) -> list[str]:
    if not ramp or ramp[0].from_step != 0:
        text = ", ".join(map(str, ramp)) or "empty"
        return [f"global_batch_size: the ramp ({text}) must start at step 1."]
    problems = [
        f"global_batch_size: the ramp must go up in steps, but ({later}) comes after ({earlier})."
        for earlier, later in itertools.pairwise(ramp)
        if later.from_step <= earlier.from_step
    ]
    problems.extend(f"global_batch_size ({point}) must be at least 1." for point in ramp if point.global_batch_size < 1)
    return problems


def _skip_problems(skips: Sequence[StepRange]) -> list[str]:
    problems = [f"skip_steps: {skip} is not a range of steps." for skip in skips if not 0 <= skip.start < skip.stop]
    for earlier, later in itertools.pairwise(skips):
        if later.start == earlier.start:
            merged = StepRange(later.start, earlier.stop + later.stop - later.start)
            problems.append(
                f"skip_steps: {earlier} and {later} start at one step. To jump over both, ask for {merged}."
            )
        elif later.start < earlier.start:
            problems.append(f"skip_steps: {later} come after {earlier}; order the ranges by first step.")
    return problems
