"""Losses that arise inside of a model, far from where its loss is computed, and have to be scaled as that is.

[Note: the scale of side losses]
A backward pass does not start from the loss of a microbatch but from a multiple of it: the loss weight, a share of the
accumulation window, the scale of fp16. A term that a layer adds must have the same factor, which nobody knows in its
forward pass, and other pipeline stages never see the loss. So the factor is read when the gradient is due. Where the loss
is computed, `announce_loss` puts an identity behind it, whose gradient is the factor, and which autograd reaches first. In
other stages the engine sets it. A term whose factor nobody has set is an error, and never guessed.

One value for the process, and not for a thread: autograd runs the backward passes of devices on threads of its own.
"""
# the end of a backward pass, for which torch has no public hook (2.11 to 2.14)
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from typing import Any, cast

import torch

__all__ = ["LOSS_SCALE", "LossScale", "announce_loss", "attach_side_loss", "expect_side_loss"]


class LossScale:
    """The gradient of the loss in the backward pass that is running. See [Note: the scale of side losses]."""

    def __init__(self) -> None:
        """Know of no backward pass."""
        self._value: torch.Tensor | float | None = None
        self.num_attached = 0
        """How many losses models of this process have attached, or will when a pass is computed again."""

    @property
    def is_awaited(self) -> bool:
        """Whether a model of this process has attached a loss yet."""
        return self.num_attached > 0

    def set(self, value: torch.Tensor | float | None) -> None:
        """Take note of the scale; None where it is not known."""
        self._value = value

    def like(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scale in the shape, dtype and place of a loss.

        Raises:
            RuntimeError: If it is not known.
        """
        if self._value is None:
            raise RuntimeError(
                "a layer adds a loss of its own, such as one for load balancing, but what it counts for in this backward "
                "pass is not known. Compute the loss as announce_loss(loss) (d9d.core.side_loss) before it is scaled; in "
                "a pipeline of the native trainer, return loss_weight from build_forward_inputs."
            )
        return torch.as_tensor(self._value, device=loss.device, dtype=loss.dtype).reshape(loss.shape)


LOSS_SCALE = LossScale()
"""The scale that layers ask and engines set."""


def announce_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss, from which the terms that layers have attached learn their factor.

    The trainers call it themselves.

    Args:
        loss: One value, before any scaling: the mean of what it is a loss of.
    """
    return cast(torch.Tensor, _Announce.apply(loss)) if loss.requires_grad else loss


def attach_side_loss(output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return the same output, through which the gradient of a loss joins its backward pass.

    The gradients are those of ``total + loss`` where the backward pass is that of ``total``, times the scale of
    ``total``. The value of the total does not change.

    Args:
        output: Whatever the total depends on.
        loss: One value.
    """
    if not (torch.is_grad_enabled() and loss.requires_grad):
        return output
    return cast(torch.Tensor, _attach(output, loss))


def expect_side_loss() -> None:
    """Take note that a layer has a loss of its own, in a pass without gradients.

    A reentrant checkpoint attaches the loss when the layer is computed again, and by then the loss of the step, which tells
    the scale, must have been announced. In compiled code it does nothing.
    """
    if not torch.compiler.is_compiling():
        LOSS_SCALE.num_attached += 1


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        LOSS_SCALE.set(grad.detach())
        # A scale must not outlive its pass: the next one may be of a loss that nobody has announced.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: LOSS_SCALE.set(None))
        return grad


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        LOSS_SCALE.num_attached += 1
        ctx.loss = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, LOSS_SCALE.like(ctx.loss)


# A compiled backward pass would keep the scale of the first one for good.
_attach: Any = torch.compiler.disable(_Attach.apply)
