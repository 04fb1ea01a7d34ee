"""Models: decoders and their heads. Each family is a package of its own below."""

from .decoder import DecoderBackbone
from .heads import (
    SINGLE_HEAD_PREFIX,
    AnyHeadConfig,
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderForEmbedding,
    DecoderWithHead,
    DecoderWithHeads,
    EmbeddingHeadConfig,
    build_decoder_head,
)

__all__ = [
    "SINGLE_HEAD_PREFIX",
    "AnyHeadConfig",
    "CausalLMHeadConfig",
    "ClassificationHeadConfig",
    "DecoderBackbone",
    "DecoderForCausalLM",
    "DecoderForClassification",
    "DecoderForEmbedding",
    "DecoderWithHead",
    "DecoderWithHeads",
    "EmbeddingHeadConfig",
    "build_decoder_head",
]
