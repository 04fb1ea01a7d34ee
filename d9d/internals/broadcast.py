"""Give all ranks of a group the values that one of them has."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["broadcast_packed"]


@torch.no_grad()
def broadcast_packed(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite tensors with those of one rank, by one collective per dtype. All ranks of the group must call it.

    For many small tensors, such as running statistics. Distributed and empty ones are left out.

    Args:
        tensors: On all ranks as many, of the same shapes and dtypes; of any layout.
        group: The ranks.
        source: The rank of the group whose values are taken.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not isinstance(tensor, DTensor):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():
        # As bytes, since backends do not know all dtypes.
        packed = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in members])
        dist.broadcast(packed, group=group, group_src=source)
        parts = packed.split([tensor.nbytes for tensor in members])
        for part, tensor in zip(parts, members, strict=True):
            # A part may begin anywhere, and a view needs an aligned beginning.
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
