"""The collectives that Lightning and users call through the strategy."""

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


@torch.no_grad()
def reduce_over(
    tensor: torch.Tensor, group: dist.ProcessGroup, operation: "dist.ReduceOp.RedOpType | str"
) -> torch.Tensor:
    """Return a tensor reduced over a group. All ranks of it must call this.

    Args:
        tensor: Of equal shape on all ranks; not changed.
        group: The ranks.
        operation: One of torch's, or its name; "mean" and "avg" of integers are floating point.

    Raises:
        ValueError: For an unknown name.
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
    reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=operation, group=group)
    return reduced.div_(group.size()) if is_mean else reduced


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
