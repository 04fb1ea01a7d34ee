"""Callbacks for modules that are distributed, in place of Lightning's own that cannot be."""

from d9d_lightning.callbacks.model_state_export import ModelStateExport
from d9d_lightning.callbacks.weight_averaging import EMAWeightAveraging
from d9d_lightning.gradients.norms import GradientNormLogger

__all__ = ["EMAWeightAveraging", "GradientNormLogger", "ModelStateExport"]
