"""Callbacks for modules that are distributed, in place of Lightning's own that cannot be."""

from d9d_lightning.gradient_norms import GradientNormLogger
from d9d_lightning.weight_averaging import EMAWeightAveraging

__all__ = ["EMAWeightAveraging", "GradientNormLogger"]
