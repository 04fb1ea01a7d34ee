"""Distribute the models of the catalogue over the meshes of a job."""

from .decoder import parallelize_decoder
from .head import parallelize_causal_lm_head, parallelize_classification_head, parallelize_embedding_head

# What a layer is made of decides how it is distributed, so one function knows all models. These are the names under
# which users of one model look for it.
parallelize_llama_model = parallelize_decoder
parallelize_qwen3_dense_model = parallelize_decoder
parallelize_qwen3_moe_model = parallelize_decoder

__all__ = [
    "parallelize_causal_lm_head",
    "parallelize_classification_head",
    "parallelize_decoder",
    "parallelize_embedding_head",
    "parallelize_llama_model",
    "parallelize_qwen3_dense_model",
    "parallelize_qwen3_moe_model",
]
