"""Writes to Aim."""

from collections.abc import Generator
from contextlib import contextmanager
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
    import_backend,
)


class AimConfig(Config):
    """Writes to Aim."""

    provider: Literal["aim"] = "aim"
    repo: str = Field(description="Folder or address of the repository.")
    log_system_params: bool = Field(default=True, description="Whether to record packages and environment.")
    capture_terminal_logs: bool = Field(default=True, description="Whether to record what the process prints.")
    system_tracking_interval: int | None = Field(
        default=10, description="Seconds between measurements of the machine; None measures nothing."
    )


class AimRun(BaseTrackerRun):
    """A run whose values go to an open Aim run."""

    # aim is not a dependency, so its types are not known.
    def __init__(self, backend: ModuleType, run: Any) -> None:  # noqa: ANN401
        """Write to an open run."""
        self._backend = backend
        self._run = run

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Write a scalar, or a histogram as a distribution over bins 0, 1, 2, ..."""
        if isinstance(value, Scalar):
            written = value.as_float()
        else:
            counts = value.as_list()
            written = self._backend.Distribution(hist=counts, bin_range=(0, len(counts)))
        self._run.track(written, name=point.name, step=point.step, context=point.context)


class AimTracker(BaseTracker[AimConfig]):
    """Writes to Aim; a job that resumes goes on with its run."""

    def __init__(self, config: AimConfig) -> None:
        """Write as the config says.

        Raises:
            ImportError: If aim is not installed.
        """
        self._config = config
        self._backend = import_backend("aim", provider="aim", install="aim")
        self._run_hash: str | None = None

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Start or resume the run; close it at the end of the block."""
        run = self._backend.Run(
            run_hash=self._run_hash,
            repo=self._config.repo,
            log_system_params=self._config.log_system_params,
            capture_terminal_logs=self._config.capture_terminal_logs,
            system_tracking_interval=self._config.system_tracking_interval,
        )
        try:
            self._run_hash = run.hash
            run.name = properties.name
            run.description = properties.description
            run["hparams"] = properties.hparams
            yield AimRun(self._backend, run)
        finally:
            run.close()

    @classmethod
    def from_config(cls, config: AimConfig) -> Self:
        """Build the tracker."""
        return cls(config)

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the run."""
        return {"run_hash": self._run_hash}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run of a hash at the next `open`."""
        self._run_hash = state_dict["run_hash"]
