"""Writes to MLflow."""

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
    flat_name,
    import_backend,
)


class MLflowConfig(Config):
    """Writes to MLflow."""

    provider: Literal["mlflow"] = "mlflow"
    experiment: str = Field(description="Experiment of the run; made if it is missing.")
    tracking_uri: str | None = Field(default=None, description="Server or folder; None is the default of MLflow.")


class MLflowRun(BaseTrackerRun):
    """A run whose values go to the open MLflow run."""

    def __init__(self, backend: ModuleType) -> None:
        """Write to the open run."""
        self._backend = backend

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Write a scalar as a metric, the counts of a histogram as a JSON artifact per step."""
        name = flat_name(point)
        if isinstance(value, Scalar):
            self._backend.log_metric(name, value.as_float(), step=point.step)
        else:
            self._backend.log_dict({"counts": value.as_list()}, f"histograms/{name}/{point.step}.json")


class MLflowTracker(BaseTracker[MLflowConfig]):
    """Writes to MLflow; a job that resumes goes on with its run."""

    def __init__(self, config: MLflowConfig) -> None:
        """Write as the config says.

        Raises:
            ImportError: If mlflow is not installed.
        """
        self._config = config
        self._backend = import_backend("mlflow", provider="mlflow", install="mlflow")
        self._run_id: str | None = None

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Start or resume the run; end it at the end of the block, as failed if that raises."""
        if self._config.tracking_uri is not None:
            self._backend.set_tracking_uri(self._config.tracking_uri)
        self._backend.set_experiment(self._config.experiment)
        resumed = self._run_id is not None
        with self._backend.start_run(
            run_id=self._run_id, run_name=properties.name, description=properties.description
        ) as run:
            self._run_id = run.info.run_id
            if not resumed:
                # Parameters of a run can not be written twice with other values.
                self._backend.log_params(properties.hparams)
            yield MLflowRun(self._backend)

    @classmethod
    def from_config(cls, config: MLflowConfig) -> Self:
        """Build the tracker."""
        return cls(config)

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run_id": self._run_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run of an id at the next `open`."""
        self._run_id = state_dict["run_id"]
