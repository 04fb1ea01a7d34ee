"""Let all ranks stop at the same batch, with a checkpoint, when some of them are told to end."""
# Lightning's signal handling has no public names
# pyright: reportPrivateUsage=false

import functools
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM, _HandlersCompose, _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_prefixed_message
from typing_extensions import override

from d9d.core.dist_context import DistributedContext
from d9d.core.preemption import SignalAgreement, end_at_once, exit_code_of
from d9d_lightning.jobs.launch import is_started_by_script

_log = logging.getLogger(__name__)


class AgreedSignals(_SignalConnector):
    """Takes the place of a Trainer's signal handling while a job runs.

    Lightning broadcasts a flag of rank 0 before each batch and reads it on the host, which waits for the device each
    time. Its handler broadcasts as well, in the middle of whatever the process does just then; it stops the rank that
    was signalled and no other one. Here a handler only notes the signal. Before a batch, about once a second, all ranks
    tell each other over the CPU; they stop before the same batch if any of them was told to, and never within an
    accumulation window. Evaluation inside of ``fit`` runs to its end first. The state that SLURM's requeue signal saves
    is that of one batch too. See [Note: ending between steps].
    """

    def __init__(self, trainer: Trainer, context: DistributedContext | None) -> None:
        """Hold back; `install` puts it in place."""
        self._pending = 0
        self._is_agreed = False
        self._pid = os.getpid()
        super().__init__(trainer)
        self._original = trainer._signal_connector
        self._requeue = 0
        self._is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._agreement = SignalAgreement(context)
        self._agreed: tuple[int, ...] = (0, 0)
        self._first_step: int | None = None

    @classmethod
    def install(cls, trainer: Trainer, context: DistributedContext | None) -> Self:
        """Replace the signal handling of a Trainer until `release`. All ranks must do so for the same run."""
        signals = cls(trainer, context)
        trainer._signal_connector = signals
        loop = trainer.fit_loop.epoch_loop
        if context is not None:
            vars(loop)["_broadcast_sigterm_tensor"] = signals.before_batch
        else:
            # A Trainer of one process asks nobody.
            vars(loop)["advance"] = functools.partial(signals._look_and_advance, loop.advance)
        return signals

    def release(self) -> None:
        """Give the Trainer its own signal handling back, and the process the handlers that it had."""
        self.teardown()
        self._original.received_sigterm = self._is_agreed or self._pending > 0
        self.trainer._signal_connector = self._original
        for name in ("_broadcast_sigterm_tensor", "advance"):
            vars(self.trainer.fit_loop.epoch_loop).pop(name, None)

    @property
    def received_sigterm(self) -> bool:
        """Whether the job ends. While fitting, the same on all ranks; in an evaluation, whether this rank was told to."""
        return self._is_agreed or (self._pending > 0 and not self._is_fitting)

    @received_sigterm.setter
    def received_sigterm(self, is_received: bool) -> None:
        self._pending = int(signal.SIGTERM) if is_received else 0
        if not is_received:
            self._is_agreed = False

    def before_batch(self) -> None:
        """Count a batch, and see in some whether any rank has been told to end. All ranks must call it.

        Raises:
            SIGTERMException: On all ranks, if so; a checkpoint is saved.
        """
        trainer = self.trainer
        if self._first_step is None:
            self._first_step = trainer.global_step
        agreed = self._agreement.exchange_if_due(self._pending, self._requeue)
        self._agreed = agreed or self._agreed
        # Gradients of half a window are in no checkpoint.
        if trainer.fit_loop._should_accumulate():
            return
        signum, requeue = self._agreed
        if requeue:
            self._agreed, self._requeue = (signum, 0), 0
            super()._slurm_sigusr_handler_fn(requeue, None)  # pyright: ignore[reportArgumentType]  # it does not look at the frame
        if signum:
            if trainer.global_step > self._first_step:
                _save_before_exit(trainer)
            self._is_agreed = True
            raise _exit_after(signum)

    def _look_and_advance(self, advance: Callable[[_DataFetcher], None], data_fetcher: _DataFetcher) -> None:
        self.before_batch()
        advance(data_fetcher)

    @override
    def register_signal_handlers(self) -> None:
        super().register_signal_handlers()
        if self._is_fitting and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            # Neither Lightning requeues by it nor has the user a handler of his own.
            self._register_signal(signal.SIGUSR1, _HandlersCompose(self._sigterm_notifier_fn))

    @override
    def _sigterm_notifier_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        _log.warning(rank_prefixed_message(f"Received {signal.Signals(signum).name}", self.trainer.local_rank))
        if self._pending or os.getpid() != self._pid:
            end_at_once(signum)
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self._is_fitting:
            launcher.kill(signum)
        self._pending = int(signum)

    @override
    def _slurm_sigusr_handler_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        if self._is_fitting:
            self._requeue = int(signum)
        else:
            super()._slurm_sigusr_handler_fn(signum, _)

    def __getstate__(self) -> dict[str, Any]:  # the attributes of any object
        return {**super().__getstate__(), "_original": None}


def _exit_after(signum: int) -> SIGTERMException:
    """Return what ends a fit, with the exit code that a launcher is to see.

    Lightning kills the first process when one that it has started ends with another code than 0, though that may still
    be writing its logs. The first process speaks for them.
    """
    return SIGTERMException(0 if is_started_by_script() else exit_code_of(signum))


def give_exit_code(exception: SIGTERMException) -> None:
    """Let an exception that Lightning itself has raised end the process with a code."""
    if exception.code is None:
        exception.code = _exit_after(signal.SIGTERM).code


def _save_before_exit(trainer: Trainer) -> None:
    """Save a checkpoint for ``fit(ckpt_path="last")`` to find. All ranks must call it."""
    callbacks = trainer.checkpoint_callbacks
    if any(isinstance(each, OnExceptionCheckpoint) for each in callbacks) or any(
        isinstance(each, ModelCheckpoint) and each.save_on_exception for each in callbacks
    ):
        return  # these do so by themselves
    checkpoint = next((each for each in callbacks if isinstance(each, ModelCheckpoint)), None)
    if checkpoint is None or checkpoint.dirpath is None:
        _log.warning("step %d is not saved: the Trainer has no ModelCheckpoint.", trainer.global_step)
        return
    # Found since its name begins as that of the last one; never a link to another checkpoint, nor removed by the callback.
    name = f"{checkpoint.CHECKPOINT_NAME_LAST}-preempted{checkpoint.FILE_EXTENSION}"
    trainer.save_checkpoint(str(Path(checkpoint.dirpath) / name))
