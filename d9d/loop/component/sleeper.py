"""Giving up device memory between steps, for other work on the same devices, and taking it back."""

from collections.abc import Iterable

from d9d.core.dist_context import DistributedContext
from d9d.core.offload import DEFAULT_SLEEP_TAGS, Offloadable, OffloadContext, OnloadContext, SleepTag
from d9d.core.protocol import OptimizerProtocol
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_SLEEP_POST,
    EVENT_TRAIN_SLEEP_PRE,
    EVENT_TRAIN_WAKE_POST,
    EVENT_TRAIN_WAKE_PRE,
    EventSleepContext,
)

__all__ = ["TrainSleeper"]


class TrainSleeper:
    """Lets a job sleep and wake: parameters, gradients and optimizer states come back bit for bit.

    Between two steps only, such as in a handler of ``EVENT_TRAIN_STEP_POST``, before or after `Trainer.train`. Each rank
    moves its own memory; no rank waits for another.
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        tracked_modules: TrackedModules,
        optimizer: OptimizerProtocol,
        gradient_manager: GradientManager,
        event_bus: EventBus,
    ) -> None:
        """Take what has device memory.

        Args:
            dist_context: Topology of the job.
            tracked_modules: Parameters and buffers.
            optimizer: Its states, if it is `Offloadable`.
            gradient_manager: Gradients.
            event_bus: Gets the events around falling asleep and waking up.
        """
        self._dist_context = dist_context
        self._gradient_manager = gradient_manager
        self._optimizer = optimizer
        self._tracked_modules = tracked_modules
        self._event_bus = event_bus
        self._asleep = set[SleepTag]()

    def sleep(self, tags: Iterable[SleepTag] = DEFAULT_SLEEP_TAGS) -> None:
        """Give up what the tags name, but for what is given up already. Blocks the host until it is done.

        Raises:
            NotImplementedError: For communicators, which torch can not give up and take back; or for an optimizer whose
                state is not known.
            RuntimeError: In the middle of a step.
        """
        new = frozenset(tags) - self._asleep
        if SleepTag.COMMS in new:
            raise NotImplementedError(
                "communicators can not be given up: torch has no way to build those of a mesh anew. Sleep with "
                "SleepTag.TENSOR_STATES, which is nearly all of the memory."
            )
        if not new:
            return
        if self._gradient_manager.has_in_flight_gradients:
            raise RuntimeError("a job can not sleep in the middle of a step. Call sleep between two steps.")
        if not isinstance(self._optimizer, Offloadable):
            raise NotImplementedError(f"{type(self._optimizer).__name__} can not be offloaded: it is not Offloadable.")
        context = EventSleepContext(tags=new)
        offload = OffloadContext(dist_context=self._dist_context, pin_memory=True)
        with self._event_bus.bounded(EVENT_TRAIN_SLEEP_PRE, EVENT_TRAIN_SLEEP_POST, context):
            # What may be refused goes first, so that nothing has moved then. What fails later is taken back by `wake`.
            self._optimizer.offload(offload)
            self._asleep |= new
            self._gradient_manager.offload(offload)
            self._tracked_modules.offload(offload)

    def wake(self, tags: Iterable[SleepTag] = DEFAULT_SLEEP_TAGS) -> None:
        """Take back what the tags name, if it is given up. Blocks the host until it is done."""
        known = frozenset(tags) & self._asleep
        if not known:
            return
        onload = OnloadContext(dist_context=self._dist_context)
        with self._event_bus.bounded(EVENT_TRAIN_WAKE_PRE, EVENT_TRAIN_WAKE_POST, EventSleepContext(tags=known)):
            for part in (self._tracked_modules, self._gradient_manager, self._optimizer):
                if isinstance(part, Offloadable):
                    part.onload(onload)
            self._asleep -= known

    def is_sleeping(self, tag: SleepTag) -> bool:
        """Tell whether what the tag names is given up."""
        return tag in self._asleep

    def refuse_asleep(self, what: str) -> None:
        """Refuse to go on while anything is given up.

        Args:
            what: What would go on, in words.

        Raises:
            RuntimeError: If anything is.
        """
        if self._asleep:
            tags = ", ".join(sorted(self._asleep))
            raise RuntimeError(f"{what} needs a job that is awake, but it sleeps ({tags}). Call wake() before.")
