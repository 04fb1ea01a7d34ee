"""Task heads: what turns the hidden states of the last stage into the outputs of a model."""

from .base import TaskHead
from .language_modelling import (
    LM_IGNORE_INDEX,
    SequenceCausalLMHeadShared,
    SequenceCausalLMOutput,
    SplitLanguageModellingHead,
)
from .pooling import (
    ClassificationHead,
    EmbeddingHead,
    SequenceClassificationOutput,
    SequenceEmbeddingOutput,
    SequencePoolingHeadShared,
    TokenMean,
)

__all__ = [
    "LM_IGNORE_INDEX",
    "ClassificationHead",
    "EmbeddingHead",
    "SequenceCausalLMHeadShared",
    "SequenceCausalLMOutput",
    "SequenceClassificationOutput",
    "SequenceEmbeddingOutput",
    "SequencePoolingHeadShared",
    "SplitLanguageModellingHead",
    "TaskHead",
    "TokenMean",
]
