"""Configure and run jobs."""

from d9d.core.offload import SleepTag
from d9d.loop.run.configure_inference import InferenceConfigurator
from d9d.loop.run.configure_train import TrainingConfigurator
from d9d.loop.run.inference import Inference
from d9d.loop.run.train import Trainer

__all__ = ["Inference", "InferenceConfigurator", "SleepTag", "Trainer", "TrainingConfigurator"]
