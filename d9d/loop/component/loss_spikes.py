"""Losses that are far above those of the steps before."""

import collections
import math
import statistics
from typing import final

import torch

from d9d.core.device import HostCopy
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import LossSpikeConfig
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.train import EVENT_TRAIN_LOSS_SPIKE, EventLossSpikeContext

__all__ = ["LossSpikeDetector"]

_DELAY_STEPS = 2
"""Steps that a loss stays on the device before the host reads it, so that no step waits for its own."""

_SIGMA = 1.4826
"""Standard deviation of normal values whose median absolute deviation is 1."""


@final
class LossSpikeDetector:
    """Tells the event bus of losses that stand out, at the same step on all ranks.

    A loss stands out if it is more than ``num_deviations`` deviations above the median of the last ``window_steps`` losses,
    or not finite. The deviation is 1.4826 times the median of the distances from the median. The window must be full.

    Source: B. Iglewicz, D. C. Hoaglin, How to Detect and Handle Outliers, 1993 (modified z-scores).

    Args:
        config: What stands out; None to look at nothing.
        schedule: Position of the job.
        event_bus: Is told of spikes.
    """

    def __init__(self, config: LossSpikeConfig | None, schedule: JobSchedule, event_bus: EventBus) -> None:
        self._config = config
        self._schedule = schedule
        self._event_bus = event_bus
        self._unread: collections.deque[tuple[int, HostCopy]] = collections.deque()
        self._window: collections.deque[float] = collections.deque(
            maxlen=None if config is None else config.window_steps
        )

    def note(self, loss: torch.Tensor) -> None:
        """Take the loss of the step under way, and judge that of two steps ago. All ranks must call it.

        Args:
            loss: Loss of the step over all ranks, one value on the device; it must not be written to any more.
        """
        if self._config is None:
            return
        self._unread.append((self._schedule.step_in_progress, HostCopy(loss.detach())))
        if len(self._unread) > _DELAY_STEPS:
            step, copy = self._unread.popleft()
            self._judge(step, float(copy.read()), self._config)

    def _judge(self, step: int, loss: float, config: LossSpikeConfig) -> None:
        median = math.nan
        if len(self._window) == config.window_steps:
            median = statistics.median(self._window)
            deviation = _SIGMA * statistics.median(abs(other - median) for other in self._window)
            stands_out = loss > median + config.num_deviations * deviation
        else:
            stands_out = False
        if math.isfinite(loss):
            self._window.append(loss)
        if stands_out or not math.isfinite(loss):
            context = EventLossSpikeContext(schedule=self._schedule, step=step, loss=loss, median=median)
            self._event_bus.trigger(EVENT_TRAIN_LOSS_SPIKE, context)
