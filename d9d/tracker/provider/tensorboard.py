"""Writes TensorBoard event files."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from d9d.core.config import Config
from d9d.tracker.base import (
    BaseTracker,
    BaseTrackerRun,
    RunConfig,
    Scalar,
    TrackerPoint,
    TrackerValue,
    flat_name,
    import_backend,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorboardConfig(Config):
    """Writes TensorBoard event files."""

    provider: Literal["tensorboard"] = "tensorboard"
    log_dir: Path = Field(description="Folder of runs; each run writes to a folder of its name in it.")


class TensorboardRun(BaseTrackerRun):
    """A run whose values go to an event file."""

    def __init__(self, writer: "SummaryWriter") -> None:
        """Write to an open writer."""
        self._writer = writer

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Write a scalar, or a histogram whose bins are 0, 1, 2, ... The context becomes part of the tag."""
        tag = flat_name(point)
        if isinstance(value, Scalar):
            self._writer.add_scalar(tag, value.as_float(), point.step)
            return
        counts = value.as_list()
        self._writer.add_histogram_raw(
            tag,
            min=0,
            max=len(counts),
            num=sum(counts),
            sum=sum(index * count for index, count in enumerate(counts)),
            sum_squares=sum(index * index * count for index, count in enumerate(counts)),
            bucket_limits=[index + 1 for index in range(len(counts))],
            bucket_counts=counts,
            global_step=point.step,
        )

    def flush(self) -> None:
        """Write the events that wait in memory, for up to two minutes otherwise."""
        self._writer.flush()


class TensorboardTracker(BaseTracker[TensorboardConfig]):
    """Writes TensorBoard event files. A job that resumes adds a file to the folder of its run."""

    def __init__(self, log_dir: Path) -> None:
        """Write to folders in ``log_dir``.

        Raises:
            ImportError: If tensorboard is not installed.
        """
        self._log_dir = log_dir
        self._backend = import_backend(
            "torch.utils.tensorboard", provider="tensorboard", install='"d9d-lightning[tensorboard]"'
        )

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Open an event file; flush and close it at the end of the block."""
        with self._backend.SummaryWriter(str(self._log_dir / properties.name)) as writer:
            if properties.description is not None:
                writer.add_text("description", properties.description)
            hparams = json.dumps(properties.hparams, default=str, indent=2)
            writer.add_text("hparams", f"```json\n{hparams}\n```")
            yield TensorboardRun(writer)

    @classmethod
    def from_config(cls, config: TensorboardConfig) -> Self:
        """Build the tracker."""
        return cls(config.log_dir)
