"""Save a state over all ranks: plan, copy, write, commit.

[Note: a save in the background]
Ranks agree on who writes what, and copy their part to the host, while training waits. A thread then writes the copies and
commits, with collectives on a process group of its own. One save is in flight at a time: the next waits for it, as does
`CheckpointSaver.wait` before the job ends. What went wrong is raised there, and by `CheckpointSaver.raise_if_failed`.
In the foreground the same is done without copies, and the files have the same bytes.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from d9d.checkpoint.documents import expanded
from d9d.checkpoint.folder import Probe, ignore_points
from d9d.checkpoint.planners import ValuesAsJsonSavePlanner
from d9d.checkpoint.record import CommitRecord
from d9d.checkpoint.writer import CheckpointWriter, Written
from d9d.core.os_errors import reason_of, reworded
from d9d.core.participants import Participants

__all__ = ["CheckpointSaver", "Destination"]


class Destination(Protocol):
    """Where checkpoints go: the folder of a run, or one path. The first rank alone calls `begin` and `commit`."""

    logger: logging.Logger
    """Where to tell what went wrong."""

    def begin(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint to."""
        ...

    def partial_path(self, step: int) -> Path:
        """Return the folder that a checkpoint is written to."""
        ...

    def final_path(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        ...

    def commit(self, record: CommitRecord) -> Path:
        """Make the checkpoint that was written complete, and return its folder."""
        ...


@final
class CheckpointSaver:
    """Saves states of a job to a folder. All ranks must make the same calls.

    Args:
        folder: Where to, such as a `CheckpointFolder`; on a file system that all ranks share.
        participants: The ranks, for what is agreed in the foreground.
        in_background: The same ranks over groups that nobody else uses, or None to save in the foreground only. See
            [Note: a save in the background].
        probe: Called at points of a save, for tests.
    """

    def __init__(
        self,
        folder: Destination,
        participants: Participants,
        in_background: Participants | None = None,
        probe: Probe = ignore_points,
    ) -> None:
        self._folder = folder
        self._participants = participants
        self._in_background = in_background
        self._probe = probe
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._in_flight: Future[None] | None = None
        self._is_abandoned = False

    # Any: states hold what their owners choose.
    def save(
        self,
        state: dict[str, Any],
        step: int,
        after_commit: Callable[[], None] = lambda: None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save a state. Blocks until it is committed or, in the background, until it is copied.

        Args:
            state: Tensors, DTensors, plain values and documents, in dictionaries and lists.
            step: Step after which it is saved.
            after_commit: Called on the first rank once the checkpoint is complete, by the thread that has written it.
            metrics: Values that tell how good it is, by name; those of the first rank count.

        Raises:
            OSError: If a file cannot be written, on all ranks; RuntimeError: if a rank is gone. Both name the checkpoint.
            TypeError: If the state holds values that JSON does not; on several ranks it is a RuntimeError.
        """
        if self._is_abandoned:
            raise RuntimeError(
                "a checkpoint of this process was given up, and may still be written: start a new process."
            )
        self.wait()
        with self.naming(step):
            write = self._prepare(state, step, dict(metrics or {}), after_commit)
        if self._in_background is None:
            write()
        else:
            self._in_flight = _in_thread(write, self._folder.logger)

    def raise_if_failed(self) -> None:
        """Raise what went wrong in the background, if that is known already. Not collective."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight. Not collective.

        Raises:
            OSError, RuntimeError, TypeError: If it failed.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def close(self) -> None:
        """Wait for the save in flight and free the copies. Not collective.

        Raises:
            OSError, RuntimeError, TypeError: If the save failed.
        """
        try:
            self.wait()
        finally:
            self._buffers.clear()

    def abandon(self, limit_s: float) -> None:
        """Give the save in flight some more time, where the job fails for another reason. Not collective, raises nothing.

        A save that needs the ranks which have failed will never end. The process may exit all the same, but not save again.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            _, unfinished = futures.wait([in_flight], timeout=limit_s)
            self._is_abandoned = len(unfinished) > 0

    def _prepare(
        self, state: dict[str, Any], step: int, metrics: dict[str, float], after_commit: Callable[[], None]
    ) -> Callable[[], None]:
        """Agree on who writes what, and return what is left to do."""
        with self._participants.failing_together():
            if self._participants.rank == 0:
                self._folder.begin(step)
        writer, planner = CheckpointWriter(self._folder.partial_path(step)), ValuesAsJsonSavePlanner()
        metadata = self._plan(state, planner, writer)
        if self._in_background is not None:
            with self._participants.failing_together():
                planner.copy_to_host(self._buffers)
        written_by = self._in_background or self._participants

        def write() -> None:
            with self.naming(step):
                written = self._write(planner, writer, written_by)
                with written_by.failing_together():
                    if written is not None:
                        assert metadata is not None  # the first rank has planned for all
                        self._commit(writer, metadata, written, step, metrics)
                        after_commit()

        return write

    def _plan(
        self, state: dict[str, Any], planner: ValuesAsJsonSavePlanner, writer: CheckpointWriter
    ) -> Metadata | None:
        """Agree on who writes what. The first rank alone learns of all."""
        is_first = self._participants.rank == 0
        with self._participants.failing_together():
            planner.set_up_planner(expanded(state), writer.storage_meta(), is_first)
            writer.set_up_storage_writer(is_first)
            local = writer.prepare_local_plan(planner.create_local_plan())
        plans = self._participants.gather_to_first(local)
        metadata: Metadata | None = None
        with self._participants.failing_together():
            if plans is not None:
                plans, metadata = planner.create_global_plan(plans)
                plans = writer.prepare_global_plan(plans)
        planner.finish_plan(self._participants.scatter_from_first(plans))
        return metadata

    def _write(
        self, planner: ValuesAsJsonSavePlanner, writer: CheckpointWriter, participants: Participants
    ) -> list[Written] | None:
        """Write the part of this rank. The first rank alone learns what all have written."""
        self._probe("before_write")
        with participants.failing_together():
            results = writer.write_data(planner.plan, planner).value()
        self._probe("after_write")
        return participants.gather_to_first(Written(results=results, files=writer.files, starts=writer.starts))

    def _commit(
        self,
        writer: CheckpointWriter,
        metadata: Metadata,
        written: Sequence[Written],
        step: int,
        metrics: dict[str, float],
    ) -> None:
        writer.finish_all(metadata, written)
        files = {name: digest for of_rank in written for name, digest in of_rank.files.items()} | writer.files
        self._folder.commit(CommitRecord(step=step, num_ranks=len(written), files=files, metrics=metrics))

    @contextlib.contextmanager
    def naming(self, step: int) -> Generator[None]:
        """Name the checkpoint in errors of the system, which tell of neither path nor purpose."""
        try:
            yield
        except OSError as error:
            reason = f"could not save the checkpoint {self._folder.final_path(step)}: {reason_of(error)}"
            raise reworded(error, reason) from error
        except RuntimeError as error:
            raise RuntimeError(f"could not save the checkpoint {self._folder.final_path(step)}: {error}") from error


def _in_thread(action: Callable[[], None], logger: logging.Logger) -> Future[None]:
    """Run an action in a thread that does not keep the process from ending, as those of an executor do.

    What goes wrong is told at once: another rank may notice first, and end the job before it is asked for here.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # handed to whoever asks for the result
            logger.error("%s", error)  # whoever asks for the result raises it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="d9d-checkpoint", daemon=True).start()
    return future
