"""Weights of Qwen3-MoE in Hugging Face's layout."""

from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperRename
from d9d.module.model.heads import SINGLE_HEAD_PREFIX
from d9d.module.model.huggingface import (
    GROUPED_QUERY_ATTENTION,
    LAYER_NORMS,
    DecoderMapping,
    ExpertsFormat,
    exporting,
    loading,
    map_experts,
    map_same_names,
)
from d9d.module.model.qwen3_moe.model import Qwen3MoEParameters
from d9d.pipelining.api import PipelineStageInfo

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


def _model(
    params: Qwen3MoEParameters, experts_format: Qwen3MoEExpertsFormat, *, stage: PipelineStageInfo | None = None
) -> DecoderMapping:
    """Describe a model without heads. See [Note: mappers of a family].

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    layer = ModelStateMapperParallel(
        [
            map_same_names(
                *LAYER_NORMS, *GROUPED_QUERY_ATTENTION, "self_attn.q_norm.weight", "self_attn.k_norm.weight"
            ),
            ModelStateMapperRename("mlp.gate.weight", "mlp.router.gate.weight"),
            map_experts(experts_format, params.layer.num_experts, params.layer.intermediate_size),
        ]
    )
    return DecoderMapping(params=params, map_layer=lambda _: layer, stage=stage)


def _model_with_head(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> DecoderMapping:
    """Describe a model with a head.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return _model(params, experts_format, stage=stage).with_head(head_prefix)


def _model_with_vectors(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    embedding_dim: int | None = None,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> DecoderMapping:
    """Describe a model with a head that gives vectors.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        embedding_dim: If the head has a projection whose weights the files have too, or shall have, its size. In files it is
            ``head.projection.weight``, which ``transformers`` does not expect and says so. None leaves it out: a new
            projection then is named in ``keep`` of `load_model_state`.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return _model(params, experts_format, stage=stage).with_head(head_prefix, embedding_dim)


mapper_from_huggingface_qwen3_moe = loading(_model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.Qwen3MoeModel`` to `Qwen3MoEModel`."""
mapper_from_huggingface_qwen3_moe_for_causal_lm = loading(_model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.Qwen3MoeForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_qwen3_moe_for_classification = loading(_model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.Qwen3MoeForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_qwen3_moe_for_embedding = loading(_model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.Qwen3MoeModel`` to `DecoderForEmbedding`."""

mapper_to_huggingface_qwen3_moe = exporting(_model, DecoderMapping.backbone)
"""Return the mapper from `Qwen3MoEModel` to ``transformers.Qwen3MoeModel``."""
mapper_to_huggingface_qwen3_moe_for_causal_lm = exporting(_model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.Qwen3MoeForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_qwen3_moe_for_classification = exporting(_model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.Qwen3MoeForSequenceClassification``."""
mapper_to_huggingface_qwen3_moe_for_embedding = exporting(_model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.Qwen3MoeModel``."""
