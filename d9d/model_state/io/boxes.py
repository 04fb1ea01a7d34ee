"""Tell which boxes of the global tensor lie in this rank's memory of a distributed one."""
# FSDP's placement of a dimension that tensor parallelism has cut before has no public name (torch 2.13)
# pyright: reportPrivateUsage=false

import dataclasses
import itertools
import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from d9d.core.placement import local_tensor
from d9d.model_state.mapper.pieces import Box

__all__ = ["LocalBox", "local_boxes", "num_elements"]

_Range = tuple[int, int]
"""Start and length."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the global tensor, and the box of the local tensor that holds it."""

    box: Box
    local: Box


def local_boxes(tensor: torch.Tensor) -> tuple[LocalBox, ...]:
    """Return the boxes of the global tensor that this rank holds. No communication.

    One box as a rule; none if the shard is empty; several where the rows of a shard are not neighbours, as where both FSDP
    and tensor parallelism cut a dimension that they do not divide. A plain tensor is held as a whole.

    Raises:
        NotImplementedError: If the placements are others than `Replicate` and shards of whole dimensions.
    """
    if not isinstance(tensor, DTensor):
        whole = Box.whole(tensor.shape)
        return (LocalBox(whole, whole),) if tensor.numel() else ()
    local_shape = tuple(local_tensor(tensor).shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    ranges: list[list[_Range]] = [[(0, size)] for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        num_chunks, index = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        dim, num_parts = _cut_by(placement, tensor)
        # Each part of before is cut, and the index-th chunks of all of them are joined.
        parts = [_chunk(ranges[dim], num_parts, part) for part in range(num_parts)]
        ranges[dim] = _joined([_chunk(part, num_chunks, index) for part in parts])
    shape = tuple(sum(length for _, length in of_dim) for of_dim in ranges)
    if math.prod(shape) != math.prod(local_shape) or (math.prod(shape) and shape != local_shape):
        raise NotImplementedError(
            f"a DTensor of shape {tuple(tensor.shape)} with the placements {tensor.placements} over the mesh "
            f"{tuple(tensor.device_mesh.shape)} holds {local_shape} on this rank instead of {shape}: its shards were "
            f"not cut as torch cuts them."
        )
    return tuple(_boxes(ranges)) if math.prod(shape) else ()


def num_elements(boxes: Iterable[LocalBox]) -> int:
    """Return how many elements boxes have together, which do not overlap."""
    return sum(math.prod(part.box.shape) for part in boxes)


def _cut_by(placement: Placement, tensor: torch.Tensor) -> tuple[int, int]:
    """Return the dimension that a placement cuts, and into how many parts it counts as cut before."""
    if isinstance(placement, _StridedShard):
        return placement.dim % tensor.ndim, int(placement.split_factor)
    if isinstance(placement, Shard):
        return placement.dim % tensor.ndim, 1
    hint = " Sum it first." if isinstance(placement, Partial) else ""
    raise NotImplementedError(
        f"a tensor of shape {tuple(tensor.shape)} has the placement {placement}, of which no rank holds plain rows.{hint}"
    )


def _chunk(ranges: list[_Range], num_chunks: int, index: int) -> list[_Range]:
    """Return one chunk of rows, as `torch.chunk` cuts them; behind the last ones it is empty."""
    total = sum(length for _, length in ranges)
    size = -(-total // num_chunks)
    first, last = min(index * size, total), min((index + 1) * size, total)
    result: list[_Range] = []
    position = 0
    for start, length in ranges:
        begin, end = max(first, position), min(last, position + length)
        if begin < end:
            result.append((start + begin - position, end - begin))
        position += length
    return result


def _joined(parts: list[list[_Range]]) -> list[_Range]:
    """Put ranges one after another, neighbours as one."""
    result: list[_Range] = []
    for start, length in itertools.chain.from_iterable(parts):
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result


def _boxes(ranges: list[list[_Range]]) -> list[LocalBox]:
    """Return all combinations of the ranges of the dimensions."""
    placed: list[list[tuple[_Range, int]]] = []
    for of_dim in ranges:
        ends = itertools.accumulate((length for _, length in of_dim), initial=0)
        placed.append(list(zip(of_dim, ends, strict=False)))
    boxes: list[LocalBox] = []
    for combination in itertools.product(*placed):
        shape = tuple(length for (_, length), _ in combination)
        start = tuple(start for (start, _), _ in combination)
        local_start = tuple(local for _, local in combination)
        boxes.append(LocalBox(Box(start, shape), Box(local_start, shape)))
    return boxes
