"""Weights of DeepSeek-V3 in Hugging Face's layout."""

from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperRename
from d9d.module.model.deepseek_v3.model import DeepSeekV3LayerParameters, DeepSeekV3Parameters
from d9d.module.model.huggingface import (
    LAYER_NORMS,
    SWIGLU,
    DecoderMapping,
    ExpertsFormat,
    MapLayer,
    MixtureFamily,
    exporting,
    loading,
    map_experts,
    map_same_names,
)

__all__ = [
    "mapper_from_huggingface_deepseek_v3",
    "mapper_from_huggingface_deepseek_v3_for_causal_lm",
    "mapper_from_huggingface_deepseek_v3_for_classification",
    "mapper_from_huggingface_deepseek_v3_for_embedding",
    "mapper_to_huggingface_deepseek_v3",
    "mapper_to_huggingface_deepseek_v3_for_causal_lm",
    "mapper_to_huggingface_deepseek_v3_for_classification",
    "mapper_to_huggingface_deepseek_v3_for_embedding",
]


def _map_attention(has_low_rank_queries: bool) -> ModelStateMapper:
    names = {"kv_a_proj_with_mqa": "kv_down_proj", "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up_proj"}
    if has_low_rank_queries:
        names |= {"q_a_proj": "q_proj.down_proj", "q_a_layernorm": "q_proj.norm", "q_b_proj": "q_proj.up_proj"}
    else:
        names["q_proj"] = "q_proj"
    names["o_proj"] = "o_proj"
    return ModelStateMapperParallel(
        [
            ModelStateMapperRename(f"self_attn.{theirs}.weight", f"self_attn.{ours}.weight")
            for theirs, ours in names.items()
        ]
    )


def _map_mixture(params: DeepSeekV3LayerParameters, experts_format: ExpertsFormat) -> ModelStateMapper:
    shared = [
        ModelStateMapperRename(f"mlp.shared_experts.{name}.weight", f"mlp.shared_expert.mlp.{name}.weight")
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    return ModelStateMapperParallel(
        [
            ModelStateMapperRename("mlp.gate.weight", "mlp.router.gate.weight"),
            ModelStateMapperRename("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"),
            map_experts(experts_format, params.num_experts, params.expert_intermediate_size),
            *shared,
        ]
    )


def _map_layers(params: DeepSeekV3Parameters, experts_format: ExpertsFormat) -> MapLayer:
    every_layer = [map_same_names(*LAYER_NORMS), _map_attention(params.layer.q_lora_rank is not None)]
    dense = ModelStateMapperParallel([*every_layer, map_same_names(*SWIGLU)])
    mixture = ModelStateMapperParallel([*every_layer, _map_mixture(params.layer, experts_format)])
    return lambda index: dense if index < params.num_dense_layers else mixture


_FAMILY = MixtureFamily(_map_layers)

mapper_from_huggingface_deepseek_v3 = loading(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.DeepseekV3Model`` to `DeepSeekV3Model`."""
mapper_from_huggingface_deepseek_v3_for_causal_lm = loading(_FAMILY.model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.DeepseekV3ForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_deepseek_v3_for_classification = loading(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.DeepseekV3ForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_deepseek_v3_for_embedding = loading(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.DeepseekV3Model`` to `DecoderForEmbedding`."""

mapper_to_huggingface_deepseek_v3 = exporting(_FAMILY.model, DecoderMapping.backbone)
"""Return the mapper from `DeepSeekV3Model` to ``transformers.DeepseekV3Model``."""
mapper_to_huggingface_deepseek_v3_for_causal_lm = exporting(_FAMILY.model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.DeepseekV3ForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_deepseek_v3_for_classification = exporting(_FAMILY.model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.DeepseekV3ForSequenceClassification``."""
mapper_to_huggingface_deepseek_v3_for_embedding = exporting(_FAMILY.model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.DeepseekV3Model``."""
