"""Weights of Qwen3 in Hugging Face's layout."""

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
from d9d.module.model.qwen3_dense.model import Qwen3DenseParameters

__all__ = [
    "mapper_from_huggingface_qwen3_dense",
    "mapper_from_huggingface_qwen3_dense_for_causal_lm",
    "mapper_from_huggingface_qwen3_dense_for_classification",
    "mapper_from_huggingface_qwen3_dense_for_embedding",
    "mapper_to_huggingface_qwen3_dense",
    "mapper_to_huggingface_qwen3_dense_for_causal_lm",
    "mapper_to_huggingface_qwen3_dense_for_classification",
    "mapper_to_huggingface_qwen3_dense_for_embedding",
]

_LAYER = map_same_names(
    *LAYER_NORMS, *GROUPED_QUERY_ATTENTION, "self_attn.q_norm.weight", "self_attn.k_norm.weight", *SWIGLU
)


def _map_layers(params: Qwen3DenseParameters) -> MapLayer:
    return lambda index: _LAYER


_FAMILY = DenseFamily(_map_layers)

mapper_from_huggingface_qwen3_dense = loading(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.Qwen3Model`` to `Qwen3DenseModel`."""
mapper_from_huggingface_qwen3_dense_for_causal_lm = loading(_FAMILY.model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.Qwen3ForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_qwen3_dense_for_classification = loading(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.Qwen3ForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_qwen3_dense_for_embedding = loading(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.Qwen3Model`` to `DecoderForEmbedding`."""

mapper_to_huggingface_qwen3_dense = exporting(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from `Qwen3DenseModel` to ``transformers.Qwen3Model``."""
mapper_to_huggingface_qwen3_dense_for_causal_lm = exporting(_FAMILY.model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.Qwen3ForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_qwen3_dense_for_classification = exporting(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.Qwen3ForSequenceClassification``."""
mapper_to_huggingface_qwen3_dense_for_embedding = exporting(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.Qwen3Model``."""
