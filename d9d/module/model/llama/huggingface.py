"""Weights of Llama in Hugging Face's layout."""

from d9d.module.model.huggingface import (
    GROUPED_QUERY_ATTENTION,
    LAYER_NORMS,
    SWIGLU,
    DecoderMapping,
    DenseFamily,
    MapLayer,
    exporting,
    loading,
    map_same_names,
)
from d9d.module.model.llama.model import LlamaParameters

__all__ = [
    "mapper_from_huggingface_llama",
    "mapper_from_huggingface_llama_for_causal_lm",
    "mapper_from_huggingface_llama_for_classification",
    "mapper_from_huggingface_llama_for_embedding",
    "mapper_to_huggingface_llama",
    "mapper_to_huggingface_llama_for_causal_lm",
    "mapper_to_huggingface_llama_for_classification",
    "mapper_to_huggingface_llama_for_embedding",
]

_LAYER = map_same_names(*LAYER_NORMS, *GROUPED_QUERY_ATTENTION, *SWIGLU)


def _map_layers(params: LlamaParameters) -> MapLayer:
    return lambda index: _LAYER


_FAMILY = DenseFamily(_map_layers)

mapper_from_huggingface_llama = loading(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.LlamaModel`` to `LlamaModel`."""
mapper_from_huggingface_llama_for_causal_lm = loading(_FAMILY.model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.LlamaForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_llama_for_classification = loading(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.LlamaForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_llama_for_embedding = loading(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.LlamaModel`` to `DecoderForEmbedding`."""

mapper_to_huggingface_llama = exporting(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from `LlamaModel` to ``transformers.LlamaModel``."""
mapper_to_huggingface_llama_for_causal_lm = exporting(_FAMILY.model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.LlamaForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_llama_for_classification = exporting(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.LlamaForSequenceClassification``."""
mapper_to_huggingface_llama_for_embedding = exporting(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.LlamaModel``."""
