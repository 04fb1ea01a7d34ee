"""Writes nothing."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, Self

from d9d.core.config import Config
from d9d.tracker.base import BaseTracker, BaseTrackerRun, RunConfig, TrackerPoint, TrackerValue


class NullConfig(Config):
    """Writes nothing."""

    provider: Literal["null"] = "null"


class NullRun(BaseTrackerRun):
    """Takes values and drops them."""

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Drop the value, without reading it from its device."""


class NullTracker(BaseTracker[NullConfig]):
    """Writes nothing."""

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Open a run that drops all values."""
        yield NullRun()

    @classmethod
    def from_config(cls, config: NullConfig) -> Self:
        """Build the tracker."""
        return cls()
