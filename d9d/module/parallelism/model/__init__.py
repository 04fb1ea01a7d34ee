"""Distribute the models of the catalogue over the meshes of a job."""

from .decoder import (
    parallelize_decoder,
    parallelize_deepseek_v3_model,
    parallelize_llama_model,
    parallelize_qwen3_dense_model,
    parallelize_qwen3_moe_model,
)
from .head import parallelize_causal_lm_head, parallelize_classification_head, parallelize_embedding_head
from .mesh_check import decoder_mesh_problems

__all__ = [
    "decoder_mesh_problems",
    "parallelize_causal_lm_head",
    "parallelize_classification_head",
    "parallelize_decoder",
    "parallelize_deepseek_v3_model",
    "parallelize_embedding_head",
    "parallelize_llama_model",
    "parallelize_qwen3_dense_model",
    "parallelize_qwen3_moe_model",
]
