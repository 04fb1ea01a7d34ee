"""Configure and run jobs."""

from d9d.core.offload import SleepTag
from d9d.loop.run.configure_train import TrainingConfigurator
from d9d.loop.run.train import Trainer

__all__ = ["SleepTag", "Trainer", "TrainingConfigurator"]
