"""The learning rate scheduler of a stage from a config."""

from typing import Literal, TypeAlias

from pydantic import Field

from d9d.core.config import Config
from d9d.core.protocol import LRSchedulerProtocol
from d9d.loop.control import InitializeLRSchedulerContext, LRSchedulerProvider
from d9d.lr_scheduler.piecewise import PiecewiseSchedulerConfig, piecewise_scheduler_from_config

__all__ = ["AutoLRSchedulerConfig", "AutoLRSchedulerProvider", "PiecewiseLRSchedulerConfig"]


class PiecewiseLRSchedulerConfig(Config):
    """Sets a learning rate that follows phases, one after another."""

    name: Literal["piecewise"] = "piecewise"
    scheduler: PiecewiseSchedulerConfig = Field(description="Phases, as multipliers of the optimizer's learning rate.")


AutoLRSchedulerConfig: TypeAlias = PiecewiseLRSchedulerConfig
"""Any scheduler, chosen by its `name` field."""


class AutoLRSchedulerProvider(LRSchedulerProvider):
    """Builds a learning rate scheduler over the steps of the job.

    Args:
        config: Scheduler and its phases.
    """

    def __init__(self, config: AutoLRSchedulerConfig) -> None:
        self._config = config

    def __call__(self, context: InitializeLRSchedulerContext) -> LRSchedulerProtocol:
        """Build the scheduler of one stage."""
        return piecewise_scheduler_from_config(
            self._config.scheduler, optimizer=context.optimizer, total_steps=context.total_steps
        )
