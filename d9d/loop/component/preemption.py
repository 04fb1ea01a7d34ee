"""Stopping a job that was told to end by a signal, on all ranks after the same step."""

import contextlib
import signal
from collections.abc import Generator
from typing import final

from d9d.core.dist_context import DistributedContext
from d9d.core.preemption import PreemptedExit, SignalAgreement, StopSignals, wait_for_ends
from d9d.loop.config import PreemptionConfig

__all__ = ["PreemptionWatch"]


@final
class PreemptionWatch:
    """Tells the loop when to stop, and ends the process afterwards. See [Note: ending between steps].

    Args:
        dist_context: Ranks of the job.
        config: Which signals tell the job to end.
    """

    def __init__(self, dist_context: DistributedContext, config: PreemptionConfig) -> None:
        self._dist_context = dist_context
        self._is_watching = bool(config.signals)
        self._signals = StopSignals([signal.Signals[name] for name in config.signals], dist_context.logger)
        self._agreement = SignalAgreement(dist_context)
        self._agreed = 0

    @contextlib.contextmanager
    def ending_process(self) -> Generator[None]:
        """Note signals while the block runs. All ranks must enter it.

        Raises:
            PreemptedExit: After the block, on all ranks once all are there, if `stops_job` has stopped it.
        """
        self._agreed = 0
        with self._signals.noted():
            yield
            if self._agreed:
                # A launcher that sees the first rank end may end the others, and one may still write its logs.
                wait_for_ends(self._dist_context)
                raise PreemptedExit(self._agreed)

    def stops_job(self) -> bool:
        """Tell whether any rank has been told to end. All ranks must call it before each step; it seldom blocks the host."""
        if self._is_watching and not self._agreed:
            agreed = self._agreement.exchange_if_due(self._signals.received)
            self._agreed = 0 if agreed is None else agreed[0]
        return bool(self._agreed)

    @property
    def signal_name(self) -> str:
        """Name of the signal that has stopped the job."""
        return signal.Signals(self._agreed).name
