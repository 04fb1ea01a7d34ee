"""Rotary position embeddings."""

from .rotary import RotaryEmbeddingApplicator, RotaryEmbeddingProvider, RotaryEmbeddingStyle
from .scaling import (
    LinearRopeScaling,
    Llama3RopeScaling,
    NoRopeScaling,
    NtkRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

__all__ = [
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "NoRopeScaling",
    "NtkRopeScaling",
    "RopeScaling",
    "RotaryEmbeddingApplicator",
    "RotaryEmbeddingProvider",
    "RotaryEmbeddingStyle",
    "YarnRopeScaling",
]
