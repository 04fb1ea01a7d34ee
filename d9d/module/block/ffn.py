"""Feed-forward networks."""

import torch
from torch import nn

from d9d.kernel.swiglu import silu_mul
from d9d.module.base import ModuleLateInit


class SwiGLU(nn.Module, ModuleLateInit):
    """A feed-forward network with a gate: ``down(silu(gate(x)) * up(x))``.

    Shapes:
        ``(..., hidden_size)`` to the same.

    Source:
        https://arxiv.org/abs/2002.05202

    Args:
        hidden_size: Size of the last axis of inputs and outputs.
        intermediate_size: Width between the projections.
        bias: Whether all three projections have a bias.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the network's output."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))

    def reset_parameters(self) -> None:
        """Initialise each projection as `nn.Linear` does."""
        self.gate_proj.reset_parameters()
        self.up_proj.reset_parameters()
        self.down_proj.reset_parameters()
