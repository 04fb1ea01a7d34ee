"""Stop a job that is restarted again and again, and never gets any further."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import NamedTuple

from d9d.core.launch import LaunchEnvironment, RestartEnvironment
from d9d.core.participants import Participants

__all__ = ["RECORD_NAME", "count_restart", "forget_restarts"]

RECORD_NAME = "restarts.json"
"""File beside the checkpoints of a run."""


class _Record(NamedTuple):
    """What the attempt before has left."""

    run_id: str
    attempt: int
    step: int | None
    """Step of the newest checkpoint when it started; None: there was none."""
    num_without_progress: int
    """Restarts in a row, up to that attempt, that found no newer checkpoint than the attempt before."""


def count_restart(
    participants: Participants,
    folder: Path,
    newest_step: int | None,
    limit: int,
    limit_name: str,
    logger: logging.Logger,
) -> None:
    """Count a start of the job, and refuse it if too many restarts in a row have found no newer checkpoint.

    Does nothing where nobody restarts jobs. All ranks must call it; blocks.

    Args:
        participants: All ranks.
        folder: Of the checkpoints of the run; that of the first rank counts.
        newest_step: Step of the newest checkpoint; None: there is none. That of the first rank counts.
        limit: Restarts in a row without progress that are allowed.
        limit_name: What the limit is called, for the error.
        logger: Told of restarts.

    Raises:
        RuntimeError: It was restarted too often without getting any further.
        OSError: The count cannot be written.
    """
    with participants.failing_together():
        environment = RestartEnvironment.read()
        # Where nobody restarts the job nothing else need be set.
        is_counting = environment.max_restarts > 0 and LaunchEnvironment.read().local_rank == 0
    # Each node counts the failures of its own processes.
    counts = participants.gather(environment.attempt if is_counting else 0)
    with participants.failing_together():
        if participants.rank == 0 and environment.max_restarts > 0:
            environment = dataclasses.replace(environment, attempt=sum(counts))
            _refuse_without_progress(folder, newest_step, limit, limit_name, environment, logger)


def forget_restarts(participants: Participants, folder: Path) -> None:
    """End the count of a job that is through: its start in a later restart is none without progress. No communication.

    Args:
        participants: All ranks.
        folder: As of `count_restart`.
    """
    if participants.rank == 0:
        (folder / RECORD_NAME).unlink(missing_ok=True)


def _refuse_without_progress(
    folder: Path,
    newest_step: int | None,
    limit: int,
    limit_name: str,
    environment: RestartEnvironment,
    logger: logging.Logger,
) -> None:
    before = _read(folder / RECORD_NAME)
    num_without_progress = 0
    if before is not None and before.run_id == environment.run_id and before.attempt < environment.attempt:
        is_further = newest_step is not None and (before.step is None or newest_step > before.step)
        num_without_progress = 0 if is_further else before.num_without_progress + 1
    _write(folder / RECORD_NAME, _Record(environment.run_id, environment.attempt, newest_step, num_without_progress))
    reached = (
        "there is no checkpoint to resume from"
        if newest_step is None
        else f"the newest checkpoint is that of step {newest_step}"
    )
    if environment.attempt > 0:
        logger.info("restart %d of the job: %s", environment.attempt, reached)
    if num_without_progress > limit:
        raise RuntimeError(
            f"the job was restarted {num_without_progress} times in a row without a newer checkpoint ({reached}), so it fails at "
            f"the same place each time: see the first error of each attempt. Mend that and start the job again, save more "
            f"often, or allow more restarts ({limit_name}, now {limit})."
        )


def _read(path: Path) -> _Record | None:
    try:
        match json.loads(path.read_text()):
            case [str(run_id), int(attempt), int() | None as step, int(num_without_progress)]:
                return _Record(run_id, attempt, step, num_without_progress)
            case _:
                return None
    except (FileNotFoundError, ValueError):
        return None  # the first attempt, or one that was killed before this file was renamed into place


def _write(path: Path, record: _Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)
