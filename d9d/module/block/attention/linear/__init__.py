"""Attention whose cost grows linearly with the sequence."""

from .decay_gate import AnyDecayGateParameters, LogSigmoidDecayGateParameters, MambaDecayGateParameters
from .delta_rule import AnyDeltaRuleConfig, ChunkedDeltaRuleConfig, FlaDeltaRuleConfig
from .gated_delta_net import GatedDeltaNet

__all__ = [
    "AnyDecayGateParameters",
    "AnyDeltaRuleConfig",
    "ChunkedDeltaRuleConfig",
    "FlaDeltaRuleConfig",
    "GatedDeltaNet",
    "LogSigmoidDecayGateParameters",
    "MambaDecayGateParameters",
]
