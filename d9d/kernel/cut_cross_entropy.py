"""Cross entropy of a linear classifier over a large vocabulary, without its logits in memory.

[Note: Cut cross entropy]

The logits of 4,096 tokens over 152 k words take 2.5 GB in fp32, and their gradient as much again, while the loss needs
two numbers per token: the logit of the label and the log of the sum of all exponentials. So the vocabulary is walked in
pieces, and of each only these numbers are kept. The backward pass computes each piece again, which costs one more matrix
product (four where three are needed), turns it into its gradient in place, and multiplies on. Walking the vocabulary and
not the tokens means that each row of the weight is read, and its gradient written, once, by a product over all tokens.

Source: "Cut Your Losses in Large-Vocabulary Language Models", https://arxiv.org/abs/2411.09009 (the idea; that paper
keeps pieces in the registers of a fused kernel, we keep them in memory of bounded size).

[Note: Parts of the vocabulary on several ranks]

Where ranks hold a part of the rows each, every rank walks its own part, and the two numbers per token are combined: one
maximum and one sum over the ranks. Then each rank computes the gradient of its rows, and its part of the gradient of the
hidden states, which the caller sums over the ranks.

Axes: T tokens, H hidden size, V words of one weight, P words of one piece.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.kernel.precision import at_least_fp32

PIECE_ELEMENTS: Final = 2**24
"""Logits that are in memory at a time: 64 MiB in fp32. Larger ones are not faster: at 4,096 tokens they give matrix
products of 4,096 columns."""
MIN_PIECE_WORDS: Final = 128
"""Words of the smallest piece, however many tokens there are: narrower products waste the hardware."""


def linear_cross_entropy_per_token(
    hidden_states: torch.Tensor,
    weights: Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    ignore_index: int,
    piece_elements: int = PIECE_ELEMENTS,
    starts: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the cross entropy of each token under ``softmax(hidden_states @ concat(weights).T)``.

    Equals `torch.nn.functional.cross_entropy` with ``reduction="none"`` on logits widened to fp32, and so do its
    gradients; memory stays bounded (see [Note: Cut cross entropy]). Under autocast, products are computed in its dtype.

    Shapes:
        Hidden states ``(T, H)``, weights ``(V_i, H)`` each, labels ``(T,)`` integers; result ``(T,)``, in fp32, or in
        fp64 for fp64 inputs.

    Args:
        hidden_states: What is classified.
        weights: Rows of the classifier; labels count through them in this order.
        labels: Index of the right row, or `ignore_index` for tokens without loss. Any other value outside the rows
            gives an infinite loss: to raise an error, the host would have to wait for the device.
        ignore_index: The label of tokens whose loss and gradients are zero.
        piece_elements: How many logits may be in memory at a time.
        starts: Label of the first row of each weight; by default weights follow each other.
        group: Ranks that hold the other rows, with the same tokens and labels; all must call this and its backward
            pass. Gradients of hidden states are this rank's part, to be summed. See [Note: Parts of the vocabulary on
            several ranks].
    """
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_states, weights = hidden_states.to(dtype), [weight.to(dtype) for weight in weights]
    # Autograd functions are untyped.
    return cast(
        torch.Tensor,
        _CutCrossEntropy.apply(
            hidden_states, labels, ignore_index, piece_elements, starts or _offsets(weights), group, *weights
        ),
    )


def _pieces(weights: Sequence[torch.Tensor], num_tokens: int, piece_elements: int) -> Iterator[tuple[int, int, int]]:
    """Yield index of the weight, and first and last row (exclusive) of each piece."""
    size = max(MIN_PIECE_WORDS, piece_elements // max(num_tokens, 1))
    for index, weight in enumerate(weights):
        num_words = weight.shape[0]
        if num_words == 0:  # a rank may have no part of a small vocabulary
            continue
        # Pieces of one weight are of one size, but for a rest of a word or so.
        num_pieces = -(-num_words // size)
        bounds = [num_words * number // num_pieces for number in range(num_pieces + 1)]
        yield from ((index, start, end) for start, end in itertools.pairwise(bounds))


def _wide_logits(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits as a model computes them, widened: ``(T, H), (P, H)`` to ``(T, P)``."""
    return at_least_fp32(F.linear(hidden_states, weight))


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # takes what is put on it
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        ignore_index: int,
        piece_elements: int,
        starts: Sequence[int],
        group: dist.ProcessGroup | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            log_sum, of_label = _scan(hidden_states, labels, weights, piece_elements, starts)
        if group is not None:
            log_sum, of_label = _combine(log_sum, of_label, group)
        ctx.save_for_backward(hidden_states, labels, log_sum, *weights)
        ctx.ignore_index = ignore_index
        ctx.piece_elements = piece_elements
        ctx.starts = starts
        return (log_sum - of_label).masked_fill(labels == ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator renames arguments
        ctx: Any,  # noqa: ANN401  # as in forward
        grad_losses: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_states, labels, log_sum, *weights = ctx.saved_tensors
        wants_hidden = ctx.needs_input_grad[0] and GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.inputs)
        wants_weight = GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.weight)
        grad_losses = grad_losses.masked_fill(labels == ctx.ignore_index, 0.0)
        # The sum over pieces is kept in the wide dtype and rounded once.
        grad_hidden = torch.zeros_like(hidden_states, dtype=log_sum.dtype) if wants_hidden else None
        grad_weights = [
            torch.empty_like(weight) if wants_weight and is_needed else None
            for weight, is_needed in zip(weights, ctx.needs_input_grad[6:], strict=True)
        ]
        for index, start, end in _pieces(weights, len(labels), ctx.piece_elements):
            piece, grad_weight = weights[index][start:end], grad_weights[index]
            if grad_hidden is None and grad_weight is None:
                continue
            grad = _grad_of_logits(
                _wide_logits(hidden_states, piece), log_sum, labels - (ctx.starts[index] + start), grad_losses
            ).to(hidden_states.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ piece
            if grad_weight is not None:
                torch.mm(grad.T, hidden_states, out=grad_weight[start:end])
        result = None if grad_hidden is None else grad_hidden.to(hidden_states.dtype)
        return result, None, None, None, None, None, *grad_weights


def _offsets(weights: Sequence[torch.Tensor]) -> list[int]:
    """Index of the first row of each weight among all rows."""
    return [sum(len(weight) for weight in weights[:index]) for index in range(len(weights))]


def _scan(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    weights: Sequence[torch.Tensor],
    piece_elements: int,
    starts: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log of the sum of exponentials, and the label's logit, of each token."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    log_sum = torch.full(labels.shape, -torch.inf, dtype=dtype, device=labels.device)
    of_label = torch.full_like(log_sum, -torch.inf)
    for index, start, end in _pieces(weights, len(labels), piece_elements):
        logits = _wide_logits(hidden_states, weights[index][start:end])
        local = labels - (starts[index] + start)
        is_inside = (local >= 0) & (local < end - start)
        picked = logits.gather(1, local.clamp(0, end - start - 1).unsqueeze(1)).squeeze(1)
        of_label = torch.where(is_inside, picked, of_label)
        # In place: `torch.logsumexp` would hold two more arrays of the piece's size.
        largest = logits.amax(1)
        exponentials = logits.sub_(largest.unsqueeze(1)).exp_()
        log_sum = torch.logaddexp(log_sum, exponentials.sum(1).log_() + largest)
    return log_sum, of_label


def _combine(
    log_sum: torch.Tensor, of_label: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine what ranks have found in their parts of the vocabulary; a label is in one part at most."""
    largest = log_sum.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    is_inside = of_label > -torch.inf
    sums = torch.stack((log_sum.sub(largest).exp(), of_label.masked_fill(~is_inside, 0.0), is_inside.to(log_sum.dtype)))
    dist.all_reduce(sums, group=group)
    total, of_label, num_inside = sums.unbind(0)
    return total.log() + largest, of_label.masked_fill(num_inside == 0, -torch.inf)


def _grad_of_logits(
    logits: torch.Tensor, log_sum: torch.Tensor, local: torch.Tensor, grad_losses: torch.Tensor
) -> torch.Tensor:
    """Turn a piece of logits, in place, into the gradient of the loss by it: ``(softmax - onehot) * grad_losses``."""
    grad = logits.sub_(log_sum.unsqueeze(1)).exp_()
    is_inside = (local >= 0) & (local < logits.shape[1])
    columns = local.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    grad.scatter_add_(1, columns, -is_inside.to(grad.dtype).unsqueeze(1))
    return grad.mul_(grad_losses.unsqueeze(1))
