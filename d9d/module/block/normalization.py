"""Normalise activations by their root mean square."""

import torch
from torch import nn

from d9d.module.base import ModuleLateInit
from d9d.module.block.precision import at_least_fp32


class RMSNorm(nn.Module, ModuleLateInit):
    """Divides the last axis by its root mean square and scales it with a learned weight.

    Inputs of 16 bits are normalised in fp32; the result has the dtype of the input. Rounding happens where the
    published models round: a plain weight multiplies the rounded values (Llama, Qwen3), a zero-centred one the
    unrounded (Gemma, Qwen3-Next). So logits do not shift when their checkpoints are loaded.

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
        wide = at_least_fp32(x)
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            scaled = normalized * (1.0 + self.weight.to(normalized.dtype))
        else:
            scaled = normalized.to(x.dtype) * self.weight
        return scaled.to(x.dtype)

    def reset_parameters(self) -> None:
        """Make the scale one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.weight.shape[0]}, eps={self.eps}, zero_centered={self.zero_centered}"
