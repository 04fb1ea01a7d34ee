"""The collectives that Lightning and users call through the strategy."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from d9d.core.dist_ops import all_gather

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "product": dist.ReduceOp.PRODUCT,
}

_OF_STACKED: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    dist.ReduceOp.PRODUCT: lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}


@torch.no_grad()
def reduce_over(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    operation: "dist.ReduceOp.RedOpType | str",
    ranks: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a tensor reduced over a group, or over some of its ranks. All of these must call this.

    Args:
        tensor: Of equal shape on all ranks; not changed.
        group: The ranks.
        operation: One of torch's, or its name; "mean" and "avg" of integers are floating point.
        ranks: Global ranks of the group that take part; None for all of them.

    Raises:
        ValueError: For an unknown name.
        NotImplementedError: For another operation over some of the ranks than sum, mean, max, min and product.
    """
    if isinstance(operation, str):
        name = operation.lower()
        is_mean = name in ("mean", "avg")
        if not is_mean and name not in _OPERATIONS:
            raise ValueError(f"reduce_op {operation!r} is unknown. Valid: mean, avg, {', '.join(_OPERATIONS)}.")
        operation = _OPERATIONS["sum" if is_mean else name]
    else:
        is_mean = operation == dist.ReduceOp.AVG
        operation = dist.ReduceOp.SUM if is_mean else operation
    if is_mean and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.get_default_dtype())
    if ranks is None:
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=operation, group=group)
        return reduced.div_(group.size()) if is_mean else reduced
    if operation not in _OF_STACKED:
        raise NotImplementedError(
            f"{operation} over some of the ranks is not there: use sum, mean, max, min or product."
        )
    reduced = _OF_STACKED[operation](_exchange(tensor.detach().contiguous(), group, ranks))
    return reduced.div_(len(ranks)) if is_mean else reduced


def _exchange(own: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> torch.Tensor:
    """Return the tensors of some ranks, stacked in their order: by messages, since a collective would need the others."""
    rank = dist.get_rank()
    of_ranks = {peer: own if peer == rank else torch.empty_like(own) for peer in ranks}
    messages = [
        dist.P2POp(operation, tensor, peer, group=group)
        for peer in ranks
        if peer != rank
        for operation, tensor in ((dist.isend, own), (dist.irecv, of_ranks[peer]))
    ]
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return torch.stack(list(of_ranks.values()))


def all_gather_stacked(tensor: torch.Tensor, group: dist.ProcessGroup, *, has_gradient: bool) -> torch.Tensor:
    """Return the tensors of all ranks of a group as one. All ranks of it must call this.

    Shapes:
        tensor: ``(*)``, equal on all ranks.
        returns: ``(group size, *)``.

    Args:
        tensor: Tensor of this rank.
        group: The ranks.
        has_gradient: Whether gradients flow back to each rank's own tensor, summed over the ranks.
    """
    if has_gradient and tensor.requires_grad:
        return all_gather_tensor_autograd(tensor.unsqueeze(0).contiguous(), 0, group)
    return torch.stack(all_gather(tensor.detach().contiguous(), group))


def decide_together(decision: bool, device: torch.device, *, of_all: bool) -> bool:
    """Return on all ranks whether all of them, or any of them, decide for something. All ranks must call it.

    Args:
        decision: What this rank decides.
        device: Device of this rank.
        of_all: Whether all ranks must be for it.
    """
    flag = torch.tensor(int(decision), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN if of_all else dist.ReduceOp.MAX)
    return bool(flag)
