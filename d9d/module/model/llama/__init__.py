"""Llama 3, and models of its layout."""

from .huggingface import (
    mapper_from_huggingface_llama,
    mapper_from_huggingface_llama_for_causal_lm,
    mapper_from_huggingface_llama_for_classification,
    mapper_from_huggingface_llama_for_embedding,
    mapper_to_huggingface_llama,
    mapper_to_huggingface_llama_for_causal_lm,
    mapper_to_huggingface_llama_for_classification,
    mapper_to_huggingface_llama_for_embedding,
)
from .model import LlamaLayer, LlamaLayerParameters, LlamaModel, LlamaParameters

__all__ = [
    "LlamaLayer",
    "LlamaLayerParameters",
    "LlamaModel",
    "LlamaParameters",
    "mapper_from_huggingface_llama",
    "mapper_from_huggingface_llama_for_causal_lm",
    "mapper_from_huggingface_llama_for_classification",
    "mapper_from_huggingface_llama_for_embedding",
    "mapper_to_huggingface_llama",
    "mapper_to_huggingface_llama_for_causal_lm",
    "mapper_to_huggingface_llama_for_classification",
    "mapper_to_huggingface_llama_for_embedding",
]
