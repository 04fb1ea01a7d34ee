"""What the native loop does about steps that are not finite."""

from typing import final

import torch
import torch.distributed as dist

from d9d.core.dist_context import DistributedContext
from d9d.internals.nonfinite import NonfiniteStepError, find_nonfinite
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.tracker_writer import TrackerWriter
from d9d.loop.config import GradientManagerConfig
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_NONFINITE,
    EVENT_TRAIN_READY,
    EventNonfiniteContext,
    EventTrainReadyContext,
)
from d9d.tracker import Scalar

__all__ = ["UpdateGuard"]

_NUM_SKIPPED = "nonfinite_steps"
"""Series of the tracker: steps that were left out so far, at each of them."""


@final
class UpdateGuard:
    """Decides whether a step updates the parameters, the same on all ranks.

    Args:
        dist_context: Ranks of the job.
        config: What to do about steps that are not finite.
        gradient_manager: Knows the loss and the weight of the step.
        schedule: Number of the step.
        event_bus: Is told of steps that are not finite.
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        config: GradientManagerConfig,
        gradient_manager: GradientManager,
        schedule: JobSchedule,
        event_bus: EventBus,
    ) -> None:
        self._group = dist.group.WORLD if dist_context.is_distributed else None
        self._logger = dist_context.logger
        self._policy = config.on_nonfinite
        self._gradient_manager = gradient_manager
        self._schedule = schedule
        self._event_bus = event_bus
        self._writer: TrackerWriter | None = None
        event_bus.subscribe(EVENT_TRAIN_READY, self._take_writer)
        self.num_skipped = 0
        """Steps that were left out since the job has started or resumed, as they were not finite."""

    def _take_writer(self, context: EventTrainReadyContext) -> None:
        self._writer = context.writer

    def allows_update(self, grad_norm: torch.Tensor) -> bool:
        """Tell whether the gradients of the step, summed and clipped, are to be used. All ranks must call it.

        The host waits for the device, unless ``on_nonfinite`` is "ignore".

        Args:
            grad_norm: Their norm before clipping, one value on the device.

        Raises:
            NonfiniteStepError: On all ranks, if the loss or the norm is not finite and the config says so.
            RuntimeError: If the step has no weight and the config says so.
        """
        if not self._gradient_manager.should_update():
            return False
        if self._policy == "ignore":
            return True
        found = find_nonfinite(self._gradient_manager.own_loss_sum, grad_norm, self._group)
        if found is None:
            return True
        self._event_bus.trigger(EVENT_TRAIN_NONFINITE, EventNonfiniteContext(schedule=self._schedule, found=found))
        step = self._schedule.step_in_progress
        if self._policy == "raise":
            raise NonfiniteStepError(
                f"step {step}: {found}. The weights are as they were before it. Look at its data and the learning rate, or set "
                f"gradient_manager.on_nonfinite: skip to leave such steps out."
            )
        self.num_skipped += 1
        if self._writer is not None:
            self._writer.log(_NUM_SKIPPED, Scalar(value=self.num_skipped))
        if self._group is None or self._group.rank() == 0:
            self._logger.warning("step %d is left out (%d since the start): %s.", step, self.num_skipped, found)
        return False
