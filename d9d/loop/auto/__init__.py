"""Providers that build the common cases from configs."""

from d9d.loop.auto.data import AutoDataConfig, AutoDataProvider, DatasetFactory
from d9d.loop.auto.data_sources import BestFitPackingConfig, WrapPackingConfig
from d9d.loop.auto.lr_scheduler import AutoLRSchedulerConfig, AutoLRSchedulerProvider
from d9d.loop.auto.optimizer import AutoOptimizerConfig, AutoOptimizerProvider

__all__ = [
    "AutoDataConfig",
    "AutoDataProvider",
    "AutoLRSchedulerConfig",
    "AutoLRSchedulerProvider",
    "AutoOptimizerConfig",
    "AutoOptimizerProvider",
    "BestFitPackingConfig",
    "DatasetFactory",
    "WrapPackingConfig",
]
