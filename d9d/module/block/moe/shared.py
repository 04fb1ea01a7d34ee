"""The expert that all tokens visit."""

import torch
from pydantic import ConfigDict, PositiveInt
from torch import nn

from d9d.core.config import Config
from d9d.module.base import ModuleLateInit
from d9d.module.block.ffn import SwiGLU


class SharedExpertParameters(Config):
    """Describes a shared expert."""

    model_config = ConfigDict(frozen=True)

    intermediate_size: PositiveInt
    """Width between its projections."""
    enable_gate: bool
    """Whether its output is multiplied by the sigmoid of a projection of the token to one number."""


class SharedSwiGLU(nn.Module, ModuleLateInit):
    """A `SwiGLU` for all tokens, with a gate if asked.

    Shapes:
        ``(..., hidden_size)`` to the same.

    Args:
        hidden_size: Size of inputs and outputs.
        params: The rest.
    """

    def __init__(self, hidden_size: int, params: SharedExpertParameters) -> None:
        super().__init__()
        self.mlp = SwiGLU(hidden_size, params.intermediate_size)
        self.gate = nn.Linear(hidden_size, 1, bias=False) if params.enable_gate else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the expert."""
        output = self.mlp(hidden_states)
        return output if self.gate is None else output * self.gate(hidden_states).sigmoid()

    def reset_parameters(self) -> None:
        """Initialise each projection as `nn.Linear` does."""
        self.mlp.reset_parameters()
        if self.gate is not None:
            self.gate.reset_parameters()
