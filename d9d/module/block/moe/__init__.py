"""Mixture of experts."""

from .bias_update import update_expert_biases
from .experts import GroupedLinear, GroupedSwiGLU
from .layer import MoELayer
from .router import RoutingResult, TopKRouter
from .router_loss import RouterLossParameters
from .routing import ExpertGroupLimit, RouterScoring, RoutingParameters
from .shared import SharedExpertParameters, SharedSwiGLU

__all__ = [
    "ExpertGroupLimit",
    "GroupedLinear",
    "GroupedSwiGLU",
    "MoELayer",
    "RouterLossParameters",
    "RouterScoring",
    "RoutingParameters",
    "RoutingResult",
    "SharedExpertParameters",
    "SharedSwiGLU",
    "TopKRouter",
    "update_expert_biases",
]
