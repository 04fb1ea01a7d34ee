"""Writes to Weights & Biases."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

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


class WandbConfig(Config):
    """Writes to Weights & Biases."""

    provider: Literal["wandb"] = "wandb"
    project: str = Field(description="Project of the run.")
    entity: str | None = Field(default=None, description="User or team; None is the default of the account.")
    group: str | None = Field(default=None, description="Group of runs.")
    tags: list[str] | None = Field(default=None, description="Tags of the run.")
    mode: Literal["online", "offline", "disabled"] = Field(default="online", description="Where values go.")
    dir: Path | None = Field(default=None, description="Folder of local files; None is the working folder.")
    capture_terminal_logs: bool = Field(default=True, description="Whether to upload what the process prints.")


class WandbRun(BaseTrackerRun):
    """A run whose values go to an open Weights & Biases run."""

    # wandb is not a dependency, so its types are not known.
    def __init__(self, backend: ModuleType, run: Any) -> None:  # noqa: ANN401
        """Write to an open run."""
        self._backend = backend
        self._run = run

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Write a scalar, or a histogram whose bins are 0, 1, 2, ... The context becomes part of the name."""
        if isinstance(value, Scalar):
            written = value.as_float()
        else:
            counts = value.as_list()
            written = self._backend.Histogram(np_histogram=(counts, list(range(len(counts) + 1))))
        # Steps go into a column: its own step may not decrease, but a job may resume from an older step.
        self._run.log({flat_name(point): written, "step": point.step})


class WandbTracker(BaseTracker[WandbConfig]):
    """Writes to Weights & Biases; a job that resumes goes on with its run."""

    def __init__(self, config: WandbConfig) -> None:
        """Write as the config says.

        Raises:
            ImportError: If wandb is not installed.
        """
        self._config = config
        self._backend = import_backend("wandb", provider="wandb", install="wandb")
        self._run_id: str | None = None

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Start or resume the run; finish it at the end of the block."""
        config = self._config
        console = "auto" if config.capture_terminal_logs else "off"
        run = self._backend.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            dir=config.dir,
            name=properties.name,
            notes=properties.description,
            config=properties.hparams,
            id=self._run_id,
            resume=None if self._run_id is None else "allow",
            settings=self._backend.Settings(console=console),
        )
        self._run_id = run.id
        run.define_metric("*", step_metric="step")
        with run:
            yield WandbRun(self._backend, run)

    @classmethod
    def from_config(cls, config: WandbConfig) -> Self:
        """Build the tracker."""
        return cls(config)

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run_id": self._run_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run of an id at the next `open`."""
        self._run_id = state_dict["run_id"]
