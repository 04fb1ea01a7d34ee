"""Divide by the root mean square."""

import torch

from d9d.kernel.precision import at_least_fp32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, zero_centered: bool = False) -> torch.Tensor:
    """Divide the last axis by its root mean square and scale it.

    Inputs of 16 bits are normalised in fp32; the result has the dtype of the input. Rounding happens where the
    published models round: a plain weight multiplies the rounded values (Llama, Qwen3), a zero-centred one the
    unrounded (Gemma, Qwen3-Next). So logits do not shift when their checkpoints are loaded.

    Shapes:
        ``(..., hidden_size)`` and ``(hidden_size,)`` to ``(..., hidden_size)``.

    Source:
        https://arxiv.org/abs/1910.07467

    Args:
        x: What is normalised.
        weight: Scale of each element.
        eps: Added to the mean square before the root.
        zero_centered: Scale by ``1 + weight``.
    """
    wide = at_least_fp32(x)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        scaled = normalized * (1.0 + weight.to(normalized.dtype))
    else:
        scaled = normalized.to(x.dtype) * weight
    return scaled.to(x.dtype)
