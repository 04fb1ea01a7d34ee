"""Weights of Qwen3-MoE in Hugging Face's layout."""

from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperRename
from d9d.module.model.heads import SINGLE_HEAD_PREFIX
from d9d.module.model.huggingface import (
    GROUPED_QUERY_ATTENTION,
    LAYER_NORMS,
    DecoderMapping,
    ExpertsFormat,
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


def _mapping(
    params: Qwen3MoEParameters, experts_format: Qwen3MoEExpertsFormat, stage: PipelineStageInfo | None
) -> DecoderMapping:
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


def mapper_from_huggingface_qwen3_moe(
    params: Qwen3MoEParameters, experts_format: Qwen3MoEExpertsFormat, *, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from ``transformers.Qwen3MoeModel`` to `Qwen3MoEModel`.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, experts_format, stage).backbone()


def mapper_from_huggingface_qwen3_moe_for_causal_lm(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> ModelStateMapper:
    """Return the mapper from ``transformers.Qwen3MoeForCausalLM`` to `DecoderForCausalLM`.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, experts_format, stage).causal_lm(head_prefix)


def mapper_from_huggingface_qwen3_moe_for_classification(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> ModelStateMapper:
    """Return the mapper from ``transformers.Qwen3MoeForSequenceClassification`` to `DecoderForClassification`.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, experts_format, stage).classification(head_prefix)


def mapper_from_huggingface_qwen3_moe_for_embedding(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    embedding_dim: int | None = None,
    stage: PipelineStageInfo | None = None,
) -> ModelStateMapper:
    """Return the mapper from ``transformers.Qwen3MoeModel`` to `DecoderForEmbedding`.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        embedding_dim: If the head has a projection whose weights the files have too, its size. None leaves it out: a
            new projection then is named in ``keep`` of `load_model_state`.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, experts_format, stage).embedding(embedding_dim)


def mapper_to_huggingface_qwen3_moe(
    params: Qwen3MoEParameters, experts_format: Qwen3MoEExpertsFormat, *, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from `Qwen3MoEModel` to ``transformers.Qwen3MoeModel``.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, experts_format, stage).backbone().inverse()


def mapper_to_huggingface_qwen3_moe_for_causal_lm(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> ModelStateMapper:
    """Return the mapper from `DecoderForCausalLM` to ``transformers.Qwen3MoeForCausalLM``.

    Args:
        params: The whole model. Tied weights are written once.
        experts_format: How the files hold the experts.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, experts_format, stage).causal_lm_to_huggingface(head_prefix)


def mapper_to_huggingface_qwen3_moe_for_classification(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> ModelStateMapper:
    """Return the mapper from `DecoderForClassification` to ``transformers.Qwen3MoeForSequenceClassification``.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, experts_format, stage).classification(head_prefix).inverse()


def mapper_to_huggingface_qwen3_moe_for_embedding(
    params: Qwen3MoEParameters,
    experts_format: Qwen3MoEExpertsFormat,
    *,
    embedding_dim: int | None = None,
    stage: PipelineStageInfo | None = None,
) -> ModelStateMapper:
    """Return the mapper from `DecoderForEmbedding` to ``transformers.Qwen3MoeModel``.

    Args:
        params: The whole model.
        experts_format: How the files hold the experts.
        embedding_dim: If the head has a projection, its size. Its weights are written under their own name, which
            ``transformers`` does not expect and says so.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, experts_format, stage).embedding(embedding_dim).inverse()
