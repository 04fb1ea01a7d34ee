"""The gate of feed-forward networks."""

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x) * y``, element by element.

    Shapes:
        Two of one shape, to the same.

    Source:
        https://arxiv.org/abs/2002.05202

    Args:
        x: The gate.
        y: What it lets through.
    """
    return F.silu(x) * y
