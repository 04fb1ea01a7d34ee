"""Mixture of experts."""

from .experts import GroupedLinear, GroupedSwiGLU
from .layer import MoELayer
from .router import RoutingResult, TopKRouter
from .shared import SharedExpertParameters, SharedSwiGLU

__all__ = [
    "GroupedLinear",
    "GroupedSwiGLU",
    "MoELayer",
    "RoutingResult",
    "SharedExpertParameters",
    "SharedSwiGLU",
    "TopKRouter",
]
