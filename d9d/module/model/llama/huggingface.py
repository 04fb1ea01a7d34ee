"""Weights of Llama in Hugging Face's layout."""

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
from d9d.module.model.llama.model import LlamaParameters
from d9d.pipelining.api import PipelineStageInfo

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


def _model(params: LlamaParameters, *, stage: PipelineStageInfo | None = None) -> DecoderMapping:
    """Describe a model without heads. See [Note: mappers of a family].

    Args:
        params: The whole model.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return DecoderMapping(params=params, map_layer=lambda _: _LAYER, stage=stage)


def _model_with_head(
    params: LlamaParameters, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
) -> DecoderMapping:
    """Describe a model with a head.

    Args:
        params: The whole model.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded or exported; None for the whole model.
    """
    return _model(params, stage=stage).with_head(head_prefix)


def _model_with_vectors(
    params: LlamaParameters,
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


mapper_from_huggingface_llama = loading(_model, DecoderMapping.backbone)
"""Return the mapper from ``transformers.LlamaModel`` to `LlamaModel`."""
mapper_from_huggingface_llama_for_causal_lm = loading(_model_with_head, DecoderMapping.causal_lm)
"""Return the mapper from ``transformers.LlamaForCausalLM`` to `DecoderForCausalLM`."""
mapper_from_huggingface_llama_for_classification = loading(_model_with_head, DecoderMapping.classification)
"""Return the mapper from ``transformers.LlamaForSequenceClassification`` to `DecoderForClassification`."""
mapper_from_huggingface_llama_for_embedding = loading(_model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from ``transformers.LlamaModel`` to `DecoderForEmbedding`."""

mapper_to_huggingface_llama = exporting(_model, DecoderMapping.backbone)
"""Return the mapper from `LlamaModel` to ``transformers.LlamaModel``."""
mapper_to_huggingface_llama_for_causal_lm = exporting(_model_with_head, DecoderMapping.causal_lm_tied_once)
"""Return the mapper from `DecoderForCausalLM` to ``transformers.LlamaForCausalLM``. Tied weights are written once."""
mapper_to_huggingface_llama_for_classification = exporting(_model_with_head, DecoderMapping.classification)
"""Return the mapper from `DecoderForClassification` to ``transformers.LlamaForSequenceClassification``."""
mapper_to_huggingface_llama_for_embedding = exporting(_model_with_vectors, DecoderMapping.embedding)
"""Return the mapper from `DecoderForEmbedding` to ``transformers.LlamaModel``."""
