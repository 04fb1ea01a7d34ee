"""Mixture of experts."""

from .experts import GroupedLinear, GroupedSwiGLU
from .layer import MoELayer
from .router import RoutingResult, TopKRouter
from .routing import ExpertGroupLimit, RouterScoring, RoutingParameters
from .shared import SharedExpertParameters, SharedSwiGLU

__all__ = [
    "ExpertGroupLimit",
    "GroupedLinear",
    "GroupedSwiGLU",
    "MoELayer",
    "RouterScoring",
    "RoutingParameters",
    "RoutingResult",
    "SharedExpertParameters",
    "SharedSwiGLU",
    "TopKRouter",
]
