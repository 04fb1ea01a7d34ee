"""Qwen3 with mixtures of experts."""

from .huggingface import (
    Qwen3MoEExpertsFormat,
    mapper_from_huggingface_qwen3_moe,
    mapper_from_huggingface_qwen3_moe_for_causal_lm,
    mapper_from_huggingface_qwen3_moe_for_classification,
    mapper_from_huggingface_qwen3_moe_for_embedding,
    mapper_to_huggingface_qwen3_moe,
    mapper_to_huggingface_qwen3_moe_for_causal_lm,
    mapper_to_huggingface_qwen3_moe_for_classification,
    mapper_to_huggingface_qwen3_moe_for_embedding,
)
from .model import Qwen3MoELayer, Qwen3MoELayerParameters, Qwen3MoEModel, Qwen3MoEParameters

__all__ = [
    "Qwen3MoEExpertsFormat",
    "Qwen3MoELayer",
    "Qwen3MoELayerParameters",
    "Qwen3MoEModel",
    "Qwen3MoEParameters",
    "mapper_from_huggingface_qwen3_moe",
    "mapper_from_huggingface_qwen3_moe_for_causal_lm",
    "mapper_from_huggingface_qwen3_moe_for_classification",
    "mapper_from_huggingface_qwen3_moe_for_embedding",
    "mapper_to_huggingface_qwen3_moe",
    "mapper_to_huggingface_qwen3_moe_for_causal_lm",
    "mapper_to_huggingface_qwen3_moe_for_classification",
    "mapper_to_huggingface_qwen3_moe_for_embedding",
]
