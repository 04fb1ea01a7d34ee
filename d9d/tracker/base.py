"""The contract of a tracker and the values that it writes."""

import abc
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch
from pydantic import Field, field_validator
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.config import Config

TConfig = TypeVar("TConfig")


class RunConfig(Config):
    """Names a run and what it was started with."""

    name: str = Field(description="Name of the run, also of its folder of checkpoints.")
    description: str | None = Field(default=None, description="Free text.")
    # Users put whatever their tracker can show.
    hparams: dict[str, Any] = Field(default_factory=dict, description="Hyperparameters to show beside the results.")

    @field_validator("name")
    @classmethod
    def _is_name_of_a_folder(cls, name: str) -> str:
        if not name or PurePosixPath(name).is_absolute() or ".." in name.split("/") or "\0" in name or "\\" in name:
            raise ValueError(
                f"{name!r} names no folder below those of checkpoints: leave out '..', backslashes and a '/' in front."
            )
        return name


@dataclass(frozen=True, slots=True)
class TrackerPoint:
    """Where a value belongs."""

    name: str
    """Name of the quantity, such as ``loss``."""
    step: int
    """Optimizer step."""
    context: dict[str, str] = field(default_factory=dict[str, str])
    """What tells quantities of one name apart, such as ``{"split": "train"}``."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number."""

    value: torch.Tensor | float
    """A number, or a tensor of one element; reading a device tensor blocks the host."""

    def as_float(self) -> float:
        """Return the number. Blocks the host if it is on a device."""
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bin."""

    counts: torch.Tensor
    """Count of each bin, such as tokens per expert. Shapes: (num_bins,)."""

    def as_list(self) -> list[float]:
        """Return the counts. Blocks the host if they are on a device."""
        return self.counts.reshape(-1).to(device="cpu", dtype=torch.float64).tolist()


TrackerValue: TypeAlias = Scalar | Histogram
"""Anything that a tracker writes."""


class BaseTrackerRun(abc.ABC):
    """An open run."""

    @abc.abstractmethod
    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Write a value. Steps may repeat when a job resumes from an older step: the later value counts."""

    def flush(self) -> None:  # noqa: B027  # most trackers keep nothing
        """Hand on what was written, so that it outlives this process. Called before a checkpoint; does nothing by default."""


class BaseTracker(abc.ABC, Stateful, Generic[TConfig]):
    """Writes the runs of a job to one place. Only the main process has one.

    Its state is saved with the checkpoints, so that a job which resumes goes on with its run.
    """

    @abc.abstractmethod
    def open(self, properties: RunConfig) -> AbstractContextManager[BaseTrackerRun]:
        """Open a run, or the one of the loaded state again; leaving the block closes it.

        Args:
            properties: Name and hyperparameters.
        """

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: TConfig) -> Self:
        """Build the tracker.

        Raises:
            ImportError: If the package behind it is not installed, with the command that installs it.
        """

    def state_dict(self) -> dict[str, Any]:  # Any: what identifies a run differs by tracker
        """Return what finds the run again; empty if its name does."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run of a state at the next `open`."""


def flat_name(point: TrackerPoint) -> str:
    """Return name and context as one path, for trackers that know no context: ``split.train/loss``."""
    return "/".join([*(f"{key}.{value}" for key, value in sorted(point.context.items())), point.name])


def import_backend(module: str, *, provider: str, install: str) -> ModuleType:
    """Import the package behind a tracker.

    Args:
        module: Its import name.
        provider: Name of the tracker in configs, for the error.
        install: What to pass to ``pip install``.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"tracker provider {provider!r} could not import {module}: {error}. Install it: pip install {install}"
        ) from error
