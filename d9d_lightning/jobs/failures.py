"""What the ranks of a job do when some of them raise: save together if all do, end together if not."""

import contextlib
import itertools
import logging
import sys
import time
import weakref

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it, and does not say so (torch 2.13)
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]  # the store has no public name (torch 2.13)
)

from d9d.core.dist_context import DistributedContext
from d9d.core.failures.error_file import write_error_file
from d9d.core.failures.report import described, is_echo
from d9d.core.failures.watch import JobWatch
from d9d.core.preemption import wait_for_ends
from d9d.pipelining.p2p import close_group

_log = logging.getLogger(__name__)

LIMIT_S = 6.0
"""How long a rank that has raised waits for the others to do so too, in seconds. What all ranks run into, they run into
within a step of each other; and where one has failed alone, all shall have ended within 10 s."""

_POLL_S = 0.02

_ALL, _SOME = "all", "some"

_CLOSED: weakref.WeakSet[DistributedContext] = weakref.WeakSet()
"""Contexts whose connections are closed after a failure of some of their ranks."""


class RunFailure:
    """Finds out, for one run of a Trainer, whether all ranks have raised.

    [Note: failing alone]
    Lightning lets callbacks act on an exception, which may save a checkpoint, and saving needs all ranks. If this one has
    raised and others wait in a collective of the step, each side would wait for the other. So ranks that have raised meet
    in the store of the job first. If all come, collectives work as ever. If not, the strategy's collectives return at once
    and write nothing, and at the end the connections are closed: ranks that wait for this one fail at once, those that
    wait for them fail next, and so on. The first of those that meet decides for all.
    """

    def __init__(self, context: DistributedContext, trainer: Trainer, timeout_s: float | None) -> None:
        """Begin a run. All ranks must do so, without waiting for each other.

        Args:
            context: Ranks of the job.
            trainer: Says whether the run has been interrupted.
            timeout_s: Time limit of the job's collectives in seconds, if shorter than `LIMIT_S`.

        Raises:
            RuntimeError: If an earlier run has closed the connections.
        """
        if context in _CLOSED:
            raise RuntimeError(
                "an earlier run in this process ended when some ranks failed, which has closed the connections between "
                "the ranks. Start the job again."
            )
        self._context = context
        self._trainer = trainer
        self._limit_s = LIMIT_S if timeout_s is None else min(LIMIT_S, timeout_s)
        self._is_alone: bool | None = None
        self._is_told_to_end = False
        self._watch = JobWatch(context)
        # The how manyeth run it is, counted by each rank for itself: all ranks make the same runs.
        self._run = _get_default_store().add(f"d9d/runs/{context.rank}", 1)

    @property
    def is_interrupted(self) -> bool:
        """Whether this rank has raised, in this run."""
        return self._trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def is_alone(self) -> bool:
        """Whether this rank has raised and not all others have. The first look after that may wait; see `LIMIT_S`."""
        if not self.is_interrupted:
            return False
        if self._is_alone is None:
            self._is_alone = self._meet() == _SOME
        return self._is_alone

    def give_up(self, error: Exception) -> None:
        """Take part in no collective of this run any more, after one has failed although all ranks had come."""
        self._is_alone = True
        _log.warning("rank %d: no checkpoint is written: %s", self._context.rank, described(error))

    def end(self, exception: BaseException) -> None:
        """Let ranks that wait for this one fail too, unless all have raised. Call it when callbacks are through.

        Args:
            exception: What was raised; it gets a note if another rank has raised before.
        """
        if not self.is_alone:
            write_error_file(exception)
            self._is_told_to_end = isinstance(exception, SIGTERMException)
            self._watch.leave()
            return
        reason = self._watch.note(exception)
        if reason is not None:
            exception.add_note(str(reason))
        _CLOSED.add(self._context)
        # On an accelerator too, ranks may wait for numbers that are exchanged over the host.
        devices = dict.fromkeys((torch.device("cpu"), self._context.current_device))
        for group, device in itertools.product(self._context.groups, devices):
            with contextlib.suppress(RuntimeError):
                close_group(group, device)
        self._watch.leave()

    def leave(self) -> None:
        """End the watch over this rank: the run is over.

        Lightning closes its loggers last. Where a signal ends all ranks, the launcher kills those that are left when the
        first one exits, so they wait here until all have come this far; not for ever, since one may fail on its way.
        """
        self._watch.leave()
        if self._is_told_to_end:
            self._is_told_to_end = False
            wait_for_ends(self._context)

    def _key(self, name: str | int) -> str:
        return f"d9d/runs/{self._run}/{name}"

    def _meet(self) -> str:
        rank, size = self._context.rank, self._context.world_size
        try:
            store = _get_default_store()
            if is_echo(sys.exc_info()[1]):
                # Gloo has closed the connections, whoever comes.
                return store.compare_set(self._key("decision"), "", _SOME).decode()
            store.set(self._key(rank), "raised")
            decision = self._wait_for_others(store, size)
        except RuntimeError as error:
            # The process that keeps the store is gone.
            _log.warning("rank %d: has lost the others: %s", rank, error)
            return _SOME
        if decision == _SOME:
            missing = [str(other) for other in range(size) if not store.check([self._key(other)])]
            _log.warning(
                "rank %d: not all ranks have failed (not: %s), so nothing that needs all of them is done any more. No "
                "checkpoint is written.",
                rank,
                ", ".join(missing) or "all by now",
            )
        return decision

    def _wait_for_others(self, store: Store, size: int) -> str:
        end_s = time.monotonic() + self._limit_s
        has_warned = False
        while not store.check([self._key("decision")]):
            if store.check([self._key(other) for other in range(size)]):
                return store.compare_set(self._key("decision"), "", _ALL).decode()
            if time.monotonic() > end_s or self._watch.has_failed:
                return store.compare_set(self._key("decision"), "", _SOME).decode()
            if not has_warned and time.monotonic() > end_s - self._limit_s / 2:
                has_warned = True
                _log.warning("rank %d has failed, and waits for other ranks to fail too.", self._context.rank)
            time.sleep(_POLL_S)
        return store.get(self._key("decision")).decode()
