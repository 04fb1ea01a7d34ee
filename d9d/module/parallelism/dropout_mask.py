"""Masks of dropouts on tensor-parallel ranks.

[Note: random numbers of parts]
Tensor-parallel ranks draw the same random numbers, so that what all of them have is dropped alike. A dropout of parts draws one
number of this common stream, from which and its rank it seeds a generator for its mask. So the stream stays common, and a layer
that is computed again for its backward pass gets the same mask, as checkpoints restore the stream.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

_NUM_SEEDS = 2**62
"""Random seeds to choose from; with a rank added they still fit."""


def drop_part(part: torch.Tensor, probability: float, rank: int, *, inplace: bool = False) -> torch.Tensor:
    """Drop elements of the part that a rank has, by a mask of its own.

    Args:
        part: What this rank has.
        probability: Of each element.
        rank: Which of the tensor-parallel ranks this is. All must call it.
        inplace: Whether to change `part`.
    """
    common = int(torch.randint(_NUM_SEEDS, (), device="cpu"))  # of the host, so that no device is waited for
    generator = torch.Generator(part.device)
    generator.manual_seed(common + rank)
    is_kept = torch.empty_like(part, dtype=torch.bool).bernoulli_(1.0 - probability, generator=generator)
    factor = is_kept.to(part.dtype) * (0.0 if probability == 1.0 else 1.0 / (1.0 - probability))
    return part.mul_(factor) if inplace else part * factor


def drop_distributed(tensor: DTensor, probability: float) -> torch.Tensor:
    """Drop elements of a tensor over one mesh dimension: alike on all ranks what they all have, parts by masks of their own.

    On ranks that all have the tensor, the mask, and what is drawn for it, are those of one process. DTensor's own dropout would
    draw the same mask for different parts on the CPU, and elsewhere from a stream of its own.
    """
    ones = torch.ones_like(tensor.to_local(), requires_grad=False)
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    is_whole = isinstance(placement, Replicate)
    mask = F.dropout(ones, probability) if is_whole else drop_part(ones, probability, mesh.get_local_rank())
    return tensor * DTensor.from_local(
        mask, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
