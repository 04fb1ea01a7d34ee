"""How fast the state of a linear attention forgets: one log of a decay, at most zero, per token and head."""

import math
from typing import Annotated, Final, Literal, TypeAlias, assert_never

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, PositiveFloat
from torch import nn

from d9d.core.config import Config
from d9d.kernel.precision import at_least_fp32
from d9d.module.base import ModuleLateInit

_RATE_RANGE: Final = (0.01, 16.0)
"""Bounds of new rates of `MambaDecayGate`. Not from zero, as in the first version: its log is not finite."""


class LogSigmoidDecayGateParameters(Config):
    """``logsigmoid(projection(x)) / normalizer``, as in gated linear attention."""

    model_config = ConfigDict(frozen=True)

    type: Literal["logsigmoid"] = "logsigmoid"
    normalizer: PositiveFloat
    """The log of the decay is divided by it: larger means a longer memory; 16 is common."""


class MambaDecayGateParameters(Config):
    """``-rate * softplus(projection(x) + bias) / normalizer``, as in Mamba 2, with a rate and a bias per head."""

    model_config = ConfigDict(frozen=True)

    type: Literal["mamba"] = "mamba"
    normalizer: PositiveFloat
    """The log of the decay is divided by it; 1 is what published models have."""
    dt_min: PositiveFloat
    """Smallest step (``softplus(bias)``) of a new layer; steps are drawn evenly in their logs."""
    dt_max: PositiveFloat
    """Largest step of a new layer."""
    dt_init_floor: PositiveFloat
    """Steps below are raised to it."""


AnyDecayGateParameters: TypeAlias = Annotated[
    LogSigmoidDecayGateParameters | MambaDecayGateParameters, Field(discriminator="type")
]
"""One kind of decay gate."""


class LogSigmoidDecayGate(nn.Module, ModuleLateInit):
    """See `LogSigmoidDecayGateParameters`.

    Source:
        https://arxiv.org/abs/2312.06635

    Args:
        hidden_size: Size of a token.
        num_heads: Number of heads.
        params: The rest.
    """

    def __init__(self, hidden_size: int, num_heads: int, params: LogSigmoidDecayGateParameters) -> None:
        super().__init__()
        self._normalizer = params.normalizer
        self.proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logs of decays, ``(..., hidden_size)`` to ``(..., num_heads)``, in fp32 at least."""
        return F.logsigmoid(at_least_fp32(self.proj(hidden_states))) / self._normalizer

    def reset_parameters(self) -> None:
        """Initialise the projection as `nn.Linear` does."""
        self.proj.reset_parameters()


class MambaDecayGate(nn.Module, ModuleLateInit):
    """See `MambaDecayGateParameters`.

    Source:
        https://arxiv.org/abs/2405.21060

    Args:
        hidden_size: Size of a token.
        num_heads: Number of heads.
        params: The rest.
    """

    def __init__(self, hidden_size: int, num_heads: int, params: MambaDecayGateParameters) -> None:
        super().__init__()
        self._params = params
        self.proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logs of decays, ``(..., hidden_size)`` to ``(..., num_heads)``, in fp32 at least."""
        # Softplus, written so that its compiled gradient takes the strides that come (torch 2.13), and exact beyond 20.
        step = -F.logsigmoid(-(at_least_fp32(self.proj(hidden_states)) + self.dt_bias))
        return -at_least_fp32(self.log_rate).exp() * step / self._params.normalizer

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection as `nn.Linear` does, draw rates evenly and steps evenly in their logs."""
        self.proj.reset_parameters()
        nn.init.uniform_(self.log_rate, *_RATE_RANGE).log_()
        nn.init.uniform_(self.dt_bias, math.log(self._params.dt_min), math.log(self._params.dt_max))
        step = self.dt_bias.exp().clamp(min=self._params.dt_init_floor)
        # The inverse of softplus: log(exp(step) - 1), without losing small steps.
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))


def build_decay_gate(
    hidden_size: int, num_heads: int, params: AnyDecayGateParameters
) -> LogSigmoidDecayGate | MambaDecayGate:
    """Build the gate that the parameters describe.

    Args:
        hidden_size: Size of a token.
        num_heads: Number of heads.
        params: Which kind, and its constants.
    """
    match params:
        case LogSigmoidDecayGateParameters():
            return LogSigmoidDecayGate(hidden_size, num_heads, params)
        case MambaDecayGateParameters():
            return MambaDecayGate(hidden_size, num_heads, params)
        case _:
            assert_never(params)
