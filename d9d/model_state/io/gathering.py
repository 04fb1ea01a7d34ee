"""Gathers sharded tensors to one rank."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from d9d.core.placement import like_parameter, local_tensor
from d9d.model_state.io.boxes import LocalBox, num_elements

__all__ = ["gather_to"]

_WORDS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes that all backends gather, by bytes. None has int16, and moving a float changes no bit of it."""


def gather_to(
    tensor: torch.Tensor, target: int, boxes_of: Callable[[int], Sequence[LocalBox] | None]
) -> torch.Tensor | None:
    """Return a whole tensor on one rank. A collective of all ranks that share it, and of their copies.

    Memory: there, two times the tensor while it is put together.

    Args:
        tensor: Plain tensors are whole already.
        target: The rank in the job.
        boxes_of: What a rank in the job holds of the tensor; None if that is no box.

    Returns:
        None, or in some cases the tensor too, on the other ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    ranks = tensor.device_mesh.mesh
    boxes = {rank: boxes_of(rank) for rank in ranks.flatten().tolist()}
    known = {rank: own for rank, own in boxes.items() if own is not None}
    if len(known) != len(boxes):
        return _on_all_ranks(tensor)
    if target not in known:
        # The target has a copy of the tensor that is shared by others.
        return None
    segments = _send_along_mesh(tensor, target, known)
    if segments is None:
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for rank, segment in segments:
        parts = known[rank]
        if parts:
            shape = [max(ends) for ends in zip(*map(_local_end, parts), strict=True)]
            values = segment.view(tensor.dtype).view(shape)
            for part in parts:
                whole[part.box.slices] = values[part.local.slices]
    return whole


def _send_along_mesh(
    tensor: DTensor, target: int, boxes: dict[int, Sequence[LocalBox]]
) -> list[tuple[int, torch.Tensor]] | None:
    """Send the bytes of all shards to a rank, along one mesh dimension after the other; return them there, by rank."""
    mesh, ranks = tensor.device_mesh, tensor.device_mesh.mesh
    own, goal = mesh.get_coordinate(), (ranks == target).nonzero()[0].tolist()
    if own is None:
        return None
    local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
    segments = [(int(ranks[tuple(own)]), local.contiguous().view(-1).view(torch.uint8))]
    # What further dimensions have brought: everything along those that cut the tensor, one copy along the others.
    further: list[int | slice] = []
    for dim in reversed(range(mesh.ndim)):
        if isinstance(tensor.placements[dim], Replicate):
            if own[dim] != goal[dim]:
                return None
            further.insert(0, goal[dim])
            continue
        if mesh.size(dim) > 1:
            blocks = [ranks[(*own[:dim], index, *further)].flatten().tolist() for index in range(mesh.size(dim))]
            sizes = [[num_elements(boxes[rank]) * tensor.itemsize for rank in block] for block in blocks]
            sent = local.new_empty(max(map(sum, sizes)), dtype=torch.uint8)
            torch.cat([segment for _, segment in segments], out=sent[: sum(len(segment) for _, segment in segments)])
            is_goal = own[dim] == goal[dim]
            received = [torch.empty_like(sent) for _ in blocks] if is_goal else None
            dist.gather(sent, received, group=mesh.get_group(dim), group_dst=goal[dim])
            if received is None:
                return None
            segments = [
                (rank, segment)
                for block, of_block, content in zip(blocks, sizes, received, strict=True)
                for rank, segment in zip(block, content[: sum(of_block)].split(of_block), strict=True)
            ]
        further.insert(0, slice(None))
    return segments


def _on_all_ranks(tensor: DTensor) -> torch.Tensor:
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.full_tensor()
    # Backends do not take all dtypes (gloo has no float8), and nothing is computed: words of the same size will do.
    words = like_parameter(local_tensor(tensor).view(_WORDS[tensor.itemsize]), tensor)
    return words.full_tensor().view(tensor.dtype) if isinstance(words, DTensor) else words


def _local_end(part: LocalBox) -> list[int]:
    return [start + size for start, size in zip(part.local.start, part.local.shape, strict=True)]
