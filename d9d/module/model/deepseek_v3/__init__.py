"""DeepSeek-V3, without the modules that predict several tokens."""

from .huggingface import (
    mapper_from_huggingface_deepseek_v3,
    mapper_from_huggingface_deepseek_v3_for_causal_lm,
    mapper_from_huggingface_deepseek_v3_for_classification,
    mapper_from_huggingface_deepseek_v3_for_embedding,
    mapper_to_huggingface_deepseek_v3,
    mapper_to_huggingface_deepseek_v3_for_causal_lm,
    mapper_to_huggingface_deepseek_v3_for_classification,
    mapper_to_huggingface_deepseek_v3_for_embedding,
)
from .model import DeepSeekV3Layer, DeepSeekV3LayerParameters, DeepSeekV3Model, DeepSeekV3Parameters

__all__ = [
    "DeepSeekV3Layer",
    "DeepSeekV3LayerParameters",
    "DeepSeekV3Model",
    "DeepSeekV3Parameters",
    "mapper_from_huggingface_deepseek_v3",
    "mapper_from_huggingface_deepseek_v3_for_causal_lm",
    "mapper_from_huggingface_deepseek_v3_for_classification",
    "mapper_from_huggingface_deepseek_v3_for_embedding",
    "mapper_to_huggingface_deepseek_v3",
    "mapper_to_huggingface_deepseek_v3_for_causal_lm",
    "mapper_to_huggingface_deepseek_v3_for_classification",
    "mapper_to_huggingface_deepseek_v3_for_embedding",
]
