"""Normalise activations by their root mean square."""

import torch
from torch import nn

from d9d.kernel.normalization import rms_norm
from d9d.module.base import ModuleLateInit


class RMSNorm(nn.Module, ModuleLateInit):
    """Divides the last axis by its root mean square and scales it with a learned weight.

    Where it rounds, and in what it computes: see `rms_norm`.

    Shapes:
        ``(..., hidden_size)`` to the same.

    Source:
        https://arxiv.org/abs/1910.07467

    Args:
        hidden_size: Size of the last axis.
        eps: Added to the mean square before the root.
        zero_centered: Scale by ``1 + weight``, so that weight decay pulls the scale to one and not to zero.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise and scale ``x``."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)

    def reset_parameters(self) -> None:
        """Make the scale one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.weight.shape[0]}, eps={self.eps}, zero_centered={self.zero_centered}"
