"""Steps whose loss or gradient norm is not finite, found by all ranks together."""

import dataclasses
from typing import Literal

import torch
import torch.distributed as dist

from d9d.core.device import accumulator_dtype
from d9d.core.dist_ops import all_gather_object

__all__ = ["NonfiniteStep", "NonfiniteStepError", "OnNonfinite", "find_nonfinite"]

OnNonfinite = Literal["raise", "skip", "ignore"]
"""What to do with a step whose loss or gradient norm is NaN or infinite: end the job, leave the weights and the state of the
optimizer as they are and go on, or take the step without looking."""


class NonfiniteStepError(RuntimeError):
    """The loss or the gradient norm of a step is not finite; weights and optimizer are as the step found them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteStep:
    """What was not finite in a step."""

    grad_norm: float
    """Norm of the gradients before clipping."""
    loss_ranks: tuple[int, ...]
    """Ranks whose loss is not finite; with `D9DStrategy` all ranks of a pipeline have its loss. Empty if only gradients are bad."""

    def __str__(self) -> str:
        """Say what was found, for a message."""
        ranks = ", ".join(map(str, self.loss_ranks))
        loss = f"the loss is not finite on rank {ranks}" if ranks else "losses are finite"
        return f"the gradient norm is {self.grad_norm}, {loss}"


def find_nonfinite(
    own_loss: torch.Tensor | None, grad_norm: torch.Tensor, group: dist.ProcessGroup | None
) -> NonfiniteStep | None:
    """Return what is not finite in a step on any of some ranks; None if all is. All of them must call it.

    The host waits until the device has computed both. One collective of one number, so that ranks decide alike even where
    one of them computes something else than its replicas.

    Args:
        own_loss: Loss, or sum of losses, of this rank, one value on the device of the job; None where there is none.
        grad_norm: Norm of the gradients of the step, one value.
        group: The ranks; None for a process on its own.
    """
    device = grad_norm.device if own_loss is None else own_loss.device
    own = torch.zeros((), device=device) if own_loss is None else own_loss.detach().reshape(())
    dtype = accumulator_dtype(device)
    is_bad = torch.stack([~torch.isfinite(own), ~torch.isfinite(grad_norm.reshape(()).to(device))]).any().to(dtype)
    if group is not None:
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX, group=group)
    values = torch.stack([is_bad, grad_norm.reshape(()).to(device, dtype), own.to(dtype)])
    found, norm, loss = values.tolist()
    if not found:
        return None
    is_finite = loss - loss == 0
    by_rank = [is_finite] if group is None else all_gather_object(is_finite, group)
    return NonfiniteStep(grad_norm=norm, loss_ranks=tuple(rank for rank, finite in enumerate(by_rank) if not finite))
