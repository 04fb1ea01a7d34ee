"""Configure and run jobs."""

from d9d.loop.run.train import Trainer, TrainingConfigurator

__all__ = ["Trainer", "TrainingConfigurator"]
