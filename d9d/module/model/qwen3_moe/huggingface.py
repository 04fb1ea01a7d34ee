"""Weights of Qwen3-MoE in Hugging Face's layout."""

from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperRename
from d9d.module.model.huggingface import (
    GROUPED_QUERY_ATTENTION,
    LAYER_NORMS,
    DecoderMapping,
    ExpertsFormat,
    MapLayer,
    MixtureFamily,
    exporting,
    loading,
    map_experts,
    map_same_names,
)
from d9d.module.model.qwen3_moe.model import Qwen3MoEParameters

__all__ = [
    "Qwen3MoEExpertsFormat",
    "mapper_from_huggingface_qwen3_moe",
    "mapper_from_huggingface_qwen3_moe_for_causal_lm",
    "mapper_from_huggingface_qwen3_moe_for_classification",
    "mapper_from_huggingface_qwen3_moe_for_embedding",
    "mapper_to_huggingface_qwen3_moe",
    "mapper_to_huggingface_qwen3_moe_for_causal_lm",
    "mapper_to_huggingface_qwen3_moe_for_classification",
    "mapper_to_huggingface_qwen3_moe_for_embedding",
]


Qwen3MoEExpertsFormat = ExpertsFormat


def _map_layers(params: Qwen3MoEParameters, experts_format: ExpertsFormat) -> MapLayer:
    layer = ModelStateMapperParallel(
        [
            map_same_names(
                *LAYER_NORMS, *GROUPED_QUERY_ATTENTION, "self_attn.q_norm.weight", "self_attn.k_norm.weight"
            ),
            ModelStateMapperRename("mlp.gate.weight", "mlp.router.gate.weight"),
            map_experts(experts_format, params.layer.num_experts, params.layer.intermediate_size),
        ]
    )
    return lambda index: layer


_FAMILY = MixtureFamily(_map_layers)

mapper_from_huggingface_qwen3_moe = loading(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.Qwen3MoeModel`` to `Qwen3MoEModel`."""
mapper_from_huggingface_qwen3_moe_for_causal_lm = loading(_FAMILY.model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.Qwen3MoeForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_qwen3_moe_for_classification = loading(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.Qwen3MoeForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_qwen3_moe_for_embedding = loading(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.Qwen3MoeModel`` to `DecoderForEmbedding`."""

mapper_to_huggingface_qwen3_moe = exporting(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from `Qwen3MoEModel` to ``transformers.Qwen3MoeModel``."""
mapper_to_huggingface_qwen3_moe_for_causal_lm = exporting(_FAMILY.model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.Qwen3MoeForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_qwen3_moe_for_classification = exporting(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.Qwen3MoeForSequenceClassification``."""
mapper_to_huggingface_qwen3_moe_for_embedding = exporting(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.Qwen3MoeModel``."""
