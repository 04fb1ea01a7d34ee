"""Find the rows of a classifier that this rank holds."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyRows:
    """The rows of several vocabularies on this rank."""

    weights: list[torch.Tensor]
    """``(V_i, hidden_size)`` each, plain, as part of the graph."""
    starts: list[int]
    """Label of the first row of each."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other rows; None if this one holds all."""


def own_rows(weights: Sequence[torch.Tensor]) -> VocabularyRows:
    """Return the rows of this rank. No communication.

    Shapes:
        ``(V_i, hidden_size)`` each: all plain, or all DTensors over one mesh of one dimension, ``Shard(0)``.

    Args:
        weights: One per vocabulary, whose labels follow each other.
    """
    offsets = list(itertools.accumulate((len(weight) for weight in weights[:-1]), initial=0))
    local: list[torch.Tensor] = []
    starts: list[int] = []
    group: dist.ProcessGroup | None = None
    for offset, weight in zip(offsets, weights, strict=True):
        if isinstance(weight, DTensor):
            _, (row, *_) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            group = weight.device_mesh.get_group()
            weight, offset = weight.to_local(), offset + row
        local.append(weight)
        starts.append(offset)
    return VocabularyRows(weights=local, starts=starts, group=group)
