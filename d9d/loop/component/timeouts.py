"""Time limits of collectives over the course of a job."""

from d9d.core.dist_context import DistributedContext
from d9d.loop.config import TimeoutConfig

__all__ = ["TimeoutManager"]

_DEVICE_SLACK_S = 4.0
"""An accelerator's library aborts the process at its limit. The watch of the job should say before who waits where."""


class TimeoutManager:
    """Gives ranks time to start up, and notices a hang soon once they run.

    Args:
        dist_context: Topology of the job.
        config: Time limits.
    """

    def __init__(self, dist_context: DistributedContext, config: TimeoutConfig) -> None:
        self._dist_context = dist_context
        self._config = config
        self._current_s: float | None = None

    def set_init(self) -> None:
        """Allow collectives the start-up limit. All ranks must call it."""
        self._set(self._config.init_timeout)

    def set_periodic(self) -> None:
        """Allow collectives the limit of a step. All ranks must call it; it costs something on the first call only."""
        self._set(self._config.step_timeout)

    def _set(self, limit_s: float) -> None:
        if self._current_s == limit_s:
            return
        on_device = self._dist_context.current_device.type != "cpu"
        self._dist_context.set_timeout(limit_s + (_DEVICE_SLACK_S if on_device else 0.0))
        self._dist_context.activity.limit_s = self._current_s = limit_s
