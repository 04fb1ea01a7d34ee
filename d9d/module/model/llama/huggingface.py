"""Weights of Llama in Hugging Face's layout."""

from d9d.model_state.mapper import ModelStateMapper
from d9d.module.model.heads import SINGLE_HEAD_PREFIX
from d9d.module.model.huggingface import (
    GROUPED_QUERY_ATTENTION,
    LAYER_NORMS,
    SWIGLU,
    DecoderMapping,
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


def _mapping(params: LlamaParameters, stage: PipelineStageInfo | None) -> DecoderMapping:
    return DecoderMapping(params=params, map_layer=lambda _: _LAYER, stage=stage)


def mapper_from_huggingface_llama(
    params: LlamaParameters, *, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from ``transformers.LlamaModel`` to `LlamaModel`.

    Args:
        params: The whole model.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, stage).backbone()


def mapper_from_huggingface_llama_for_causal_lm(
    params: LlamaParameters, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from ``transformers.LlamaForCausalLM`` to `DecoderForCausalLM`.

    Args:
        params: The whole model.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, stage).causal_lm(head_prefix)


def mapper_from_huggingface_llama_for_classification(
    params: LlamaParameters, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from ``transformers.LlamaForSequenceClassification`` to `DecoderForClassification`.

    Args:
        params: The whole model.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, stage).classification(head_prefix)


def mapper_from_huggingface_llama_for_embedding(
    params: LlamaParameters, *, embedding_dim: int | None = None, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from ``transformers.LlamaModel`` to `DecoderForEmbedding`.

    Args:
        params: The whole model.
        embedding_dim: If the head has a projection whose weights the files have too, its size. None leaves it out: a
            new projection then is named in ``keep`` of `load_model_state`.
        stage: The pipeline stage that is loaded; None for the whole model.
    """
    return _mapping(params, stage).embedding(embedding_dim)


def mapper_to_huggingface_llama(params: LlamaParameters, *, stage: PipelineStageInfo | None = None) -> ModelStateMapper:
    """Return the mapper from `LlamaModel` to ``transformers.LlamaModel``.

    Args:
        params: The whole model.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, stage).backbone().inverse()


def mapper_to_huggingface_llama_for_causal_lm(
    params: LlamaParameters, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from `DecoderForCausalLM` to ``transformers.LlamaForCausalLM``.

    Args:
        params: The whole model. Tied weights are written once.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, stage).causal_lm_to_huggingface(head_prefix)


def mapper_to_huggingface_llama_for_classification(
    params: LlamaParameters, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from `DecoderForClassification` to ``transformers.LlamaForSequenceClassification``.

    Args:
        params: The whole model.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, stage).classification(head_prefix).inverse()


def mapper_to_huggingface_llama_for_embedding(
    params: LlamaParameters, *, embedding_dim: int | None = None, stage: PipelineStageInfo | None = None
) -> ModelStateMapper:
    """Return the mapper from `DecoderForEmbedding` to ``transformers.LlamaModel``.

    Args:
        params: The whole model.
        embedding_dim: If the head has a projection, its size. Its weights are written under their own name, which
            ``transformers`` does not expect and says so.
        stage: The pipeline stage that is exported; None for the whole model.
    """
    return _mapping(params, stage).embedding(embedding_dim).inverse()
