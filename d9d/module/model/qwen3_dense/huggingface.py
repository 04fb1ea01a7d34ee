"""Weights of Qwen3 in Hugging Face's layout."""

from d9d.module.model.heads import SINGLE_HEAD_PREFIX
from d9d.module.model.huggingface import (
    GROUPED_QUERY_ATTENTION,
    LAYER_NORMS,
    SWIGLU,
    DecoderMapping,
    exporting,
    loading,
    map_same_names,
)
from d9d.module.model.qwen3_dense.model import Qwen3DenseParameters
from d9d.pipelining.api import PipelineStageInfo

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


def _model(params: Qwen3DenseParameters, *, stage: PipelineStageInfo | None = None) -> DecoderMapping:
    """Describe a model without heads. See [Note: mappers of a family].

    Args:
        params: The whole model.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return DecoderMapping(params=params, map_layer=lambda _: _LAYER, stage=stage)


def _model_with_head(
    params: Qwen3DenseParameters, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
) -> DecoderMapping:
    """Describe a model with a head.

    Args:
        params: The whole model.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return _model(params, stage=stage).with_head(head_prefix)


def _model_with_vectors(
    params: Qwen3DenseParameters,
    *,
    embedding_dim: int | None = None,
    head_prefix: str = SINGLE_HEAD_PREFIX,
    stage: PipelineStageInfo | None = None,
) -> DecoderMapping:
    """Describe a model with a head that gives vectors.

    Args:
        params: The whole model.
        embedding_dim: If the head has a projection whose weights the files have too, or shall have, its size. In files it is
            ``head.projection.weight``, which ``transformers`` does not expect and says so. None leaves it out: a new
            projection then is named in ``keep`` of `load_model_state`.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return _model(params, stage=stage).with_head(head_prefix, embedding_dim)


mapper_from_huggingface_qwen3_dense = loading(_model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.Qwen3Model`` to `Qwen3DenseModel`."""
mapper_from_huggingface_qwen3_dense_for_causal_lm = loading(_model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.Qwen3ForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_qwen3_dense_for_classification = loading(_model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.Qwen3ForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_qwen3_dense_for_embedding = loading(_model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.Qwen3Model`` to `DecoderForEmbedding`."""

mapper_to_huggingface_qwen3_dense = exporting(_model, DecoderMapping.backbone)
"""Return the mapper from `Qwen3DenseModel` to ``transformers.Qwen3Model``."""
mapper_to_huggingface_qwen3_dense_for_causal_lm = exporting(_model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.Qwen3ForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_qwen3_dense_for_classification = exporting(_model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.Qwen3ForSequenceClassification``."""
mapper_to_huggingface_qwen3_dense_for_embedding = exporting(_model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.Qwen3Model``."""
