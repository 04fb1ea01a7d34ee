"""Attention whose cost grows linearly with the sequence."""

from .decay_gate import AnyDecayGateParameters, LogSigmoidDecayGateParameters, MambaDecayGateParameters
from .gated_delta_net import GatedDeltaNet

__all__ = [
    "AnyDecayGateParameters",
    "GatedDeltaNet",
    "LogSigmoidDecayGateParameters",
    "MambaDecayGateParameters",
]
