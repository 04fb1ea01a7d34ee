"""Where 16 bits are too few."""

import torch


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32 if its dtype is narrower, else itself; sums, norms and softmax are computed in this."""
    return tensor.float() if tensor.dtype.itemsize < torch.float32.itemsize else tensor
