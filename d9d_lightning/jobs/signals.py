"""Let all ranks stop at the same batch when some of them are told to end."""
# Lightning's signal handling has no public names
# pyright: reportPrivateUsage=false

import logging
import time
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM, _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_prefixed_message
from typing_extensions import override

from d9d.core.dist_context import DistributedContext

_log = logging.getLogger(__name__)

_TARGET_S = 1.0
"""Time between two exchanges that they settle at, in seconds: short against the 30 s that schedulers leave a job to save
in, and long against the tenth of a millisecond that an exchange takes."""

_MAX_BATCHES = 256
"""Most batches between two exchanges, so that a stretch of fast batches does not put off the next one for long."""


class AgreedSignals(_SignalConnector):
    """Takes the place of a Trainer's signal handling while a distributed job runs.

    Lightning broadcasts a flag of rank 0 before each batch and reads it on the host, which waits for the device each
    time. Its handler broadcasts as well, in the middle of whatever the process does just then; it stops the rank that
    was signalled and no other one. Here a handler only notes the signal. Before a batch, about once a second, all ranks
    tell each other over the CPU; they stop in the same batch if any of them was told to. Evaluation inside of ``fit`` runs
    to its end first. The state that SLURM's requeue signal saves is that of one batch too.
    """

    def __init__(self, trainer: Trainer, context: DistributedContext) -> None:
        """Hold back; `install` puts it in place."""
        self._is_pending = False
        self._is_agreed = False
        super().__init__(trainer)
        self._original = trainer._signal_connector
        self._requeue: int | None = None
        self._is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._device = _host_device(context)
        self._num_batches_left = 1
        self._interval = 1
        self._last_exchange_s = time.monotonic()

    @classmethod
    def install(cls, trainer: Trainer, context: DistributedContext) -> Self:
        """Replace the signal handling of a Trainer until `release`. All ranks must do so for the same run."""
        signals = cls(trainer, context)
        trainer._signal_connector = signals
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = signals.before_batch
        return signals

    def release(self) -> None:
        """Give the Trainer its own signal handling back, and the process the handlers that it had."""
        self.teardown()
        self._original.received_sigterm = self._is_pending or self._is_agreed
        self.trainer._signal_connector = self._original
        vars(self.trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)

    @property
    def received_sigterm(self) -> bool:
        """Whether the job ends. While fitting, the same on all ranks; in an evaluation, whether this rank was told to."""
        return self._is_agreed or (self._is_pending and not self._is_fitting)

    @received_sigterm.setter
    def received_sigterm(self, is_received: bool) -> None:
        self._is_pending = is_received
        if not is_received:
            self._is_agreed = False

    def before_batch(self) -> None:
        """Count a batch, and see in some whether any rank has been told to end. All ranks must call it.

        Raises:
            SIGTERMException: On all ranks, if so.
        """
        self._num_batches_left -= 1
        if self._num_batches_left > 0:
            return
        now_s = time.monotonic()
        mine = [float(self._is_pending), float(self._requeue or 0), now_s - self._last_exchange_s]
        shared = torch.tensor(mine, device=self._device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        is_ending, requeue, elapsed_s = shared.tolist()
        self._last_exchange_s = now_s
        # The slowest rank's time, so that all ranks come to the same number.
        fitting = self._interval * _TARGET_S / max(elapsed_s, 1e-6)
        self._interval = int(min(max(fitting, 1), 2 * self._interval, _MAX_BATCHES))
        self._num_batches_left = self._interval
        if requeue:
            self._requeue = None
            super()._slurm_sigusr_handler_fn(int(requeue), None)  # pyright: ignore[reportArgumentType]  # it does not look at the frame
        if is_ending:
            self._is_agreed = True
            raise SIGTERMException

    @override
    def _sigterm_notifier_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        _log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", self.trainer.local_rank))
        launcher = self.trainer.strategy.launcher
        if not self._is_pending and launcher is not None:
            launcher.kill(signum)
        self._is_pending = True

    @override
    def _slurm_sigusr_handler_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        if self._is_fitting:
            self._requeue = int(signum)
        else:
            super()._slurm_sigusr_handler_fn(signum, _)

    def __getstate__(self) -> dict[str, Any]:  # the attributes of any object
        return {**super().__getstate__(), "_original": None}


def _host_device(context: DistributedContext) -> torch.device:
    """Return where the default group exchanges a few numbers; the CPU, unless the user has made a group without one."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config() else context.current_device
