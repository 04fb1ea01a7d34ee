"""A learning rate schedule made of phases, each of which moves a multiplier along a curve."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias, assert_never

import torch
from pydantic import ConfigDict, Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from d9d.core.config import Config
from d9d.core.protocol import LRSchedulerProtocol
from d9d.lr_scheduler.curves import CurveBase, CurveCosine, CurveExponential, CurveLinear, CurvePoly

__all__ = [
    "CurveBase",
    "CurveCosine",
    "CurveExponential",
    "CurveLinear",
    "CurvePoly",
    "PhaseConfig",
    "PiecewiseLRScheduler",
    "PiecewiseScheduleBuilder",
    "PiecewiseSchedulerConfig",
    "piecewise_schedule",
    "piecewise_scheduler_from_config",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """What was asked of a phase; where it ends may depend on the total number of steps."""

    mode: Literal["steps", "percentage", "rest"]
    amount: float
    target: float
    curve: CurveBase

    def end(self, start: int, total_steps: int | None) -> int | None:
        """Return the first step after the phase; None when that needs a total that is not known."""
        match self.mode:
            case "steps":
                return start + int(self.amount)
            case "percentage":
                return None if total_steps is None else round(self.amount * total_steps)
            case "rest":
                return total_steps
            case _:
                assert_never(self.mode)

    def __str__(self) -> str:
        match self.mode:
            case "steps":
                return f"for_steps({self.amount:g})"
            case "percentage":
                return f"until_percentage({self.amount:g})"
            case "rest":
                return "fill_rest()"
            case _:
                assert_never(self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """A phase with its place: steps ``start <= step < end``."""

    start: int
    end: int
    initial: float
    target: float
    curve: CurveBase


class _PiecewiseMultiplier:
    """The multiplier as a function of the step; constant after the last segment."""

    def __init__(self, initial: float, segments: Sequence[_Segment]) -> None:
        self._segments = [segment for segment in segments if segment.end > segment.start]
        self._ends = [segment.end for segment in self._segments]
        self._final = segments[-1].target if segments else initial

    def __call__(self, step: int) -> float:
        index = bisect.bisect_right(self._ends, step)
        if index == len(self._segments):
            return self._final
        segment = self._segments[index]
        position = (step - segment.start) / (segment.end - segment.start)
        return segment.curve.compute(segment.initial, segment.target, position)


class PiecewiseLRScheduler(LRScheduler):
    """Sets each learning rate to its initial value times a multiplier that follows phases.

    Its state is numbers only: the number of steps done and the initial learning rates. Loading it also sets the
    learning rates of the optimizer, so that the order in which optimizer and schedule are restored does not matter.
    """

    def __init__(self, optimizer: Optimizer, multiplier: _PiecewiseMultiplier) -> None:
        """Set the learning rates of the first step."""
        self._multiplier = multiplier
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each parameter group at the present step."""
        multiplier = self._multiplier(self.last_epoch)
        return [float(base) * multiplier for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:  # Any: the base class
        """Return the number of steps done and the initial learning rates."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(base) for base in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state and set the learning rates of the optimizer.

        Raises:
            ValueError: If the optimizer has another number of parameter groups.
        """
        groups = self.optimizer.param_groups
        base_lrs = [float(base) for base in state_dict["base_lrs"]]
        if len(base_lrs) != len(groups):
            raise ValueError(
                f"the saved schedule has {len(base_lrs)} parameter groups, but the optimizer has {len(groups)}."
            )
        self.base_lrs = list(base_lrs)
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class PiecewiseScheduleBuilder:
    """Collects phases one after another; each starts at the multiplier at which the last one ended.

    Nothing is checked before `build`, which reports all problems at once.
    """

    def __init__(self, initial_multiplier: float, total_steps: int | None = None) -> None:
        """Start without phases. See `piecewise_schedule`."""
        self._initial = initial_multiplier
        self._total_steps = total_steps
        self._phases: list[_Phase] = []

    def for_steps(self, steps: int, target_multiplier: float, curve: CurveBase) -> Self:
        """Add a phase of a number of steps.

        Args:
            steps: Its length.
            target_multiplier: Multiplier at its end.
            curve: Path to it.
        """
        self._phases.append(_Phase(mode="steps", amount=steps, target=target_multiplier, curve=curve))
        return self

    def until_percentage(self, p: float, target_multiplier: float, curve: CurveBase) -> Self:
        """Add a phase that ends at a part of all steps, counted from the start of the schedule.

        Args:
            p: Part of the total number of steps, from 0 to 1; rounded to a whole step.
            target_multiplier: Multiplier at its end.
            curve: Path to it.
        """
        self._phases.append(_Phase(mode="percentage", amount=p, target=target_multiplier, curve=curve))
        return self

    def fill_rest(self, target_multiplier: float, curve: CurveBase) -> Self:
        """Add a last phase that takes all steps that are left, which may be none.

        Args:
            target_multiplier: Multiplier at its end.
            curve: Path to it.
        """
        self._phases.append(_Phase(mode="rest", amount=0.0, target=target_multiplier, curve=curve))
        return self

    def build(self, optimizer: Optimizer) -> PiecewiseLRScheduler:
        """Build the schedule and set the learning rates of the first step.

        Raises:
            ValueError: With all that is wrong with the phases.
        """
        problems = self._value_problems()
        segments = self._place(problems)
        if problems:
            raise ValueError("The learning rate schedule is wrong:\n" + "\n".join(f"- {line}" for line in problems))
        return PiecewiseLRScheduler(optimizer, _PiecewiseMultiplier(self._initial, segments))

    def _value_problems(self) -> list[str]:
        problems: list[str] = []
        if self._total_steps is not None and self._total_steps < 1:
            problems.append(f"total_steps ({self._total_steps}) must be at least 1.")
        if not _is_multiplier(self._initial):
            problems.append(f"initial_multiplier ({self._initial}) must be finite and not negative.")
        initial = self._initial
        for index, phase in enumerate(self._phases):
            where = f"phase {index}, {phase}"
            if phase.mode == "steps" and (phase.amount < 1 or phase.amount != int(phase.amount)):
                problems.append(f"{where}: the number of steps must be a whole number of at least 1.")
            if phase.mode == "percentage" and not 0 < phase.amount <= 1:
                problems.append(f"{where}: must be above 0 and at most 1, where 1 is the whole schedule.")
            if phase.mode == "rest" and index != len(self._phases) - 1:
                problems.append(f"{where}: must be the last of the {len(self._phases)} phases.")
            if not _is_multiplier(phase.target):
                problems.append(f"{where}: target_multiplier ({phase.target}) must be finite and not negative.")
            elif isinstance(phase.curve, CurveExponential) and not (initial > 0 and phase.target > 0):
                problems.append(f"{where}: an exponential curve can not go from {initial:g} to {phase.target:g}.")
            initial = phase.target
        return problems

    def _place(self, problems: list[str]) -> list[_Segment]:
        """Return the phases with their steps; add what does not fit to the problems."""
        segments: list[_Segment] = []
        start, initial = 0, self._initial
        for index, phase in enumerate(self._phases):
            end = phase.end(start, self._total_steps)
            if end is None:
                problems.append(f"phase {index}, {phase}: needs total_steps, which is not given.")
                end = start
            elif end < start:
                problems.append(
                    f"phase {index}, {phase}: ends at step {end} of {self._total_steps}, but the phases before it end "
                    f"at step {start}. Shorten them by {start - end} steps, or end this one later."
                )
            segments.append(_Segment(start=start, end=end, initial=initial, target=phase.target, curve=phase.curve))
            start, initial = max(start, end), phase.target
        return segments


def _is_multiplier(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def piecewise_schedule(initial_multiplier: float, total_steps: int | None = None) -> PiecewiseScheduleBuilder:
    """Start a schedule; add phases to what is returned and call its ``build``.

    After the last phase the multiplier stays. Phases of fixed length may be longer than the job.

    Args:
        initial_multiplier: Multiplier at the first step.
        total_steps: Number of steps of the job; phases that end at a percentage, or fill the rest, need it.
    """
    return PiecewiseScheduleBuilder(initial_multiplier, total_steps)


class _Config(Config):
    model_config = ConfigDict(frozen=True)


class CurveLinearConfig(_Config):
    """Straight line."""

    type: Literal["linear"] = "linear"

    def build(self) -> CurveBase:
        """Build the curve."""
        return CurveLinear()


class CurveCosineConfig(_Config):
    """Half a cosine wave, flat at both ends."""

    type: Literal["cosine"] = "cosine"

    def build(self) -> CurveBase:
        """Build the curve."""
        return CurveCosine()


class CurvePolyConfig(_Config):
    """Power of the position in the phase."""

    type: Literal["poly"] = "poly"
    power: float = Field(gt=0, description="Exponent; 1 is linear, 2 starts flat.")

    def build(self) -> CurveBase:
        """Build the curve."""
        return CurvePoly(self.power)


class CurveExponentialConfig(_Config):
    """The same factor in each step; both multipliers must be positive."""

    type: Literal["exponential"] = "exponential"

    def build(self) -> CurveBase:
        """Build the curve."""
        return CurveExponential()


CurveConfig: TypeAlias = Annotated[
    CurveLinearConfig | CurveCosineConfig | CurvePolyConfig | CurveExponentialConfig, Field(discriminator="type")
]
"""Any curve, chosen by its `type` field."""


class _PhaseConfigBase(_Config):
    target_multiplier: float = Field(ge=0, allow_inf_nan=False, description="Multiplier at the end of the phase.")
    curve: CurveConfig = Field(description="Path from the multiplier before the phase to the target.")


class StepsPhaseConfig(_PhaseConfigBase):
    """A phase of a number of steps."""

    mode: Literal["steps"] = "steps"
    steps: int = Field(ge=1, description="Length of the phase, in optimizer steps.")


class PercentagePhaseConfig(_PhaseConfigBase):
    """A phase that ends at a part of all steps."""

    mode: Literal["percentage"] = "percentage"
    percentage: float = Field(gt=0, le=1, description="End of the phase as a part of all steps; 1 is the whole job.")


class RestPhaseConfig(_PhaseConfigBase):
    """A last phase that takes all steps that are left."""

    mode: Literal["rest"] = "rest"


PhaseConfig: TypeAlias = Annotated[
    StepsPhaseConfig | PercentagePhaseConfig | RestPhaseConfig, Field(discriminator="mode")
]
"""Any phase, chosen by its `mode` field."""


class PiecewiseSchedulerConfig(_Config):
    """A learning rate schedule made of phases."""

    initial_multiplier: float = Field(ge=0, allow_inf_nan=False, description="Multiplier at the first step.")
    phases: list[PhaseConfig] = Field(description="Phases, one after another; the last multiplier stays.")


def piecewise_scheduler_from_config(
    config: PiecewiseSchedulerConfig, optimizer: Optimizer, total_steps: int | None
) -> LRSchedulerProtocol:
    """Build a schedule from its config and set the learning rates of the first step.

    Args:
        config: Phases.
        optimizer: Its learning rates are what the multipliers multiply.
        total_steps: Number of steps of the job; None when it is not known.

    Raises:
        ValueError: With all that is wrong with the phases, given the number of steps.
    """
    builder = piecewise_schedule(config.initial_multiplier, total_steps)
    for phase in config.phases:
        curve = phase.curve.build()
        match phase:
            case StepsPhaseConfig():
                builder.for_steps(phase.steps, phase.target_multiplier, curve)
            case PercentagePhaseConfig():
                builder.until_percentage(phase.percentage, phase.target_multiplier, curve)
            case RestPhaseConfig():
                builder.fill_rest(phase.target_multiplier, curve)
            case _:
                assert_never(phase)
    return builder.build(optimizer)
