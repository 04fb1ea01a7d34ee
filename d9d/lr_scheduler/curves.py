"""How a multiplier moves from one value to another within a phase."""

import abc
import math


class CurveBase(abc.ABC):
    """A path from one multiplier to another."""

    @abc.abstractmethod
    def compute(self, start: float, end: float, step_p: float) -> float:
        """Return the multiplier within a phase.

        Args:
            start: Value at the start of the phase.
            end: Value at its end.
            step_p: Position in the phase, from 0 (start) to 1 (end).
        """


class CurveLinear(CurveBase):
    """``start + (end - start) * p``."""

    def compute(self, start: float, end: float, step_p: float) -> float:
        """Return the multiplier at a position from 0 to 1."""
        return start + (end - start) * step_p


class CurveCosine(CurveBase):
    """``end + (start - end) * (1 + cos(pi * p)) / 2``: flat at both ends.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, eq. 5.
    """

    def compute(self, start: float, end: float, step_p: float) -> float:
        """Return the multiplier at a position from 0 to 1."""
        return end + (start - end) * (1.0 + math.cos(math.pi * step_p)) / 2.0


class CurvePoly(CurveBase):
    """``start + (end - start) * p ** power``: flat at the start for powers above 1."""

    def __init__(self, power: float) -> None:
        """Make a curve.

        Args:
            power: Exponent; 1 is linear.

        Raises:
            ValueError: If the power is not positive.
        """
        if not power > 0:
            raise ValueError(f"power ({power}) must be positive; 1 is linear.")
        self._power = power

    def compute(self, start: float, end: float, step_p: float) -> float:
        """Return the multiplier at a position from 0 to 1."""
        return start + (end - start) * step_p**self._power


class CurveExponential(CurveBase):
    """``start * (end / start) ** p``: the same factor in each step."""

    def compute(self, start: float, end: float, step_p: float) -> float:
        """Return the multiplier at a position from 0 to 1.

        Raises:
            ValueError: If a value is not positive: no factor leads to or from 0.
        """
        if not (start > 0 and end > 0):
            raise ValueError(f"an exponential curve needs positive multipliers, not {start} -> {end}.")
        return start * (end / start) ** step_p
