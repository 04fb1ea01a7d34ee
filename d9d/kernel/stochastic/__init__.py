"""Stochastic rounding to bfloat16."""

from .rounding import adamw_stochastic_bf16_, copy_fp32_to_bf16_stochastic_

__all__ = ["adamw_stochastic_bf16_", "copy_fp32_to_bf16_stochastic_"]
