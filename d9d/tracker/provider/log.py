"""Writes to the log of the process."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, Self

from d9d.core.config import Config
from d9d.tracker.base import BaseTracker, BaseTrackerRun, RunConfig, Scalar, TrackerPoint, TrackerValue

_LOGGER = logging.getLogger("d9d.tracker")


class LogConfig(Config):
    """Writes one line per value to the Python logger ``d9d.tracker``, at level INFO."""

    provider: Literal["log"] = "log"


class LogRun(BaseTrackerRun):
    """A run whose values are log lines."""

    def __init__(self, name: str) -> None:
        """Open a run of a name."""
        self._name = name

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Log the value, or the counts of a histogram."""
        shown = f"{value.as_float():.6g}" if isinstance(value, Scalar) else str(value.as_list())
        context = "".join(f" {key}={item}" for key, item in sorted(point.context.items()))
        _LOGGER.info("%s step %d%s: %s = %s", self._name, point.step, context, point.name, shown)


class LogTracker(BaseTracker[LogConfig]):
    """Writes to the log of the process."""

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Log that the run starts, its hyperparameters and its values."""
        _LOGGER.info("%s: hyperparameters %s", properties.name, properties.hparams)
        yield LogRun(properties.name)

    @classmethod
    def from_config(cls, config: LogConfig) -> Self:
        """Build the tracker."""
        return cls()
