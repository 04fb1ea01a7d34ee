"""Writes what a job measures to files, logs and experiment trackers."""

from d9d.tracker.base import (
    BaseTracker,
    BaseTrackerRun,
    Histogram,
    RunConfig,
    Scalar,
    TrackerPoint,
    TrackerValue,
)
from d9d.tracker.factory import AnyTrackerConfig, tracker_from_config

__all__ = [
    "AnyTrackerConfig",
    "BaseTracker",
    "BaseTrackerRun",
    "Histogram",
    "RunConfig",
    "Scalar",
    "TrackerPoint",
    "TrackerValue",
    "tracker_from_config",
]
