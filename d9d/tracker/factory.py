"""Builds a tracker from its config."""

from typing import Annotated, Any, TypeAlias, assert_never

from pydantic import Field

from d9d.tracker.base import BaseTracker
from d9d.tracker.provider.aim import AimConfig, AimTracker
from d9d.tracker.provider.jsonl import JsonlConfig, JsonlTracker
from d9d.tracker.provider.log import LogConfig, LogTracker
from d9d.tracker.provider.mlflow import MLflowConfig, MLflowTracker
from d9d.tracker.provider.null import NullConfig, NullTracker
from d9d.tracker.provider.tensorboard import TensorboardConfig, TensorboardTracker
from d9d.tracker.provider.wandb import WandbConfig, WandbTracker

AnyTrackerConfig: TypeAlias = Annotated[
    AimConfig | JsonlConfig | LogConfig | MLflowConfig | NullConfig | TensorboardConfig | WandbConfig,
    Field(discriminator="provider"),
]
"""Any tracker, chosen by its `provider` field."""


def tracker_from_config(config: AnyTrackerConfig) -> BaseTracker[Any]:  # the config of whichever it is
    """Build a tracker. Only the main process needs one; it imports the package behind it.

    Raises:
        ImportError: If that package is not installed, with the command that installs it.
    """
    match config:
        case NullConfig():
            return NullTracker.from_config(config)
        case LogConfig():
            return LogTracker.from_config(config)
        case JsonlConfig():
            return JsonlTracker.from_config(config)
        case TensorboardConfig():
            return TensorboardTracker.from_config(config)
        case WandbConfig():
            return WandbTracker.from_config(config)
        case MLflowConfig():
            return MLflowTracker.from_config(config)
        case AimConfig():
            return AimTracker.from_config(config)
        case _:
            assert_never(config)
