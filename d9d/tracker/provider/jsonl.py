"""Appends values to a file, one JSON object per line."""

import json
import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self, TextIO

from pydantic import Field

from d9d.core.config import Config
from d9d.core.os_errors import reason_of, reworded
from d9d.tracker.base import BaseTracker, BaseTrackerRun, RunConfig, Scalar, TrackerPoint, TrackerValue


class JsonlConfig(Config):
    """Appends one JSON object per value to a file."""

    provider: Literal["jsonl"] = "jsonl"
    path: Path = Field(description="File to append to; several runs may share it. Missing folders are made.")


class JsonlRun(BaseTrackerRun):
    """A run whose values are lines of an open file."""

    def __init__(self, name: str, file: TextIO) -> None:
        """Open a run of a name on a line-buffered file."""
        self._name = name
        self._file = file

    def write(self, point: TrackerPoint, value: TrackerValue) -> None:
        """Append a line and flush it.

        JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which ``float`` reads.
        """
        counts = value.as_float() if isinstance(value, Scalar) else value.as_list()
        line = {
            "run": self._name,
            "step": point.step,
            "name": point.name,
            "value": [_json_number(count) for count in counts] if isinstance(counts, list) else _json_number(counts),
            "context": point.context,
            "time": time.time(),
        }
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise reworded(error, f"could not write to the log {self._file.name}: {reason_of(error)}") from error


class JsonlTracker(BaseTracker[JsonlConfig]):
    """Appends values to a file, one JSON object per line.

    A line has ``run``, ``step``, ``name``, ``value`` (a number; a list of counts for a histogram), ``context`` and
    ``time`` (seconds since 1970). When a job resumes, its lines follow those of the time before; of lines that agree in
    run, step, name and context, the last counts. Hyperparameters go to ``<name of the file>.runs.jsonl`` beside it.
    """

    def __init__(self, path: Path) -> None:
        """Write to a file."""
        self._path = path

    @contextmanager
    def open(self, properties: RunConfig) -> Generator[BaseTrackerRun]:
        """Open the file to append to it, and close it at the end of the block."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        started = {"run": properties.name, "description": properties.description, "time": time.time()}
        with _open_to_append(self._path.with_name(f"{self._path.stem}.runs.jsonl")) as runs:
            # Hyperparameters may be anything, such as paths and dtypes.
            runs.write(json.dumps({**started, "hparams": properties.hparams}, default=str) + "\n")
        with _open_to_append(self._path) as file:
            yield JsonlRun(properties.name, file)

    @classmethod
    def from_config(cls, config: JsonlConfig) -> Self:
        """Build the tracker."""
        return cls(config.path)


def _open_to_append(path: Path) -> TextIO:
    file = path.open("a+", encoding="utf-8", buffering=1)
    # A process that was killed may have left half a line, which would swallow the next one.
    end = file.tell()
    if end:
        with path.open("rb") as content:
            content.seek(end - 1)
            if content.read(1) != b"\n":
                file.write("\n")
    return file


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
