"""Heads that look at some tokens of a sequence: classification and embedding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from d9d.kernel.precision import at_least_fp32

from .base import TaskHead


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePoolingHeadShared:
    """What pooling heads need beside hidden states."""

    pooling_mask: torch.Tensor | None = None
    """``(batch, tokens)``: nonzero for the tokens whose mean stands for the sequence, such as the last one, or all that
    are no padding. Without a mask nothing is pooled, and every token has outputs of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassificationOutput:
    """What the classification head gives."""

    scores: torch.Tensor
    """Logits: ``(batch, num_labels)``, or ``(batch, tokens, num_labels)`` without a pooling mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEmbeddingOutput:
    """What the embedding head gives."""

    embeddings: torch.Tensor
    """``(batch, embedding_dim)``, or ``(batch, tokens, embedding_dim)`` without a pooling mask."""


class TokenMean(nn.Module):
    """Averages over the tokens of a sequence that a mask selects, those on other context-parallel ranks too.

    [Note: outputs of whole sequences]
    Where ranks have parts of sequences, each gets the mean over all parts. So all compute the same from it, and the same loss,
    which counts on each of them: the loss of a step is their weighted mean. Its gradient on a part is therefore the sum of
    what all ranks have for it.
    """

    context_parallel_degree: int = 1

    def __init__(self) -> None:
        super().__init__()
        self._sum_over_parts: Callable[[torch.Tensor], torch.Tensor] = _unchanged

    def use_context_group(self, group: dist.ProcessGroup) -> None:
        """Average over the tokens of all ranks of a group; `parallelize_context` calls it.

        From then on all of its ranks must call the module together, and its backward pass too.

        Args:
            group: Ranks with parts of the same sequences.
        """

        def sum_over_parts(own: torch.Tensor) -> torch.Tensor:
            # A function, since a copy of the module must not copy the group.
            return cast("torch.Tensor", _SumOverRanks.apply(own, group))

        self._sum_over_parts = sum_over_parts
        self.context_parallel_degree = group.size()

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the means; zeros where no token is selected.

        Sums are taken in fp32 at least. What stands at other tokens does not matter, even if it is not finite.

        Shapes:
            ``(batch, tokens, hidden_size)``, mask ``(batch, tokens)``, to ``(batch, hidden_size)``.

        Args:
            hidden_states: Vectors of tokens.
            mask: Nonzero for the tokens that count; None for all.

        Raises:
            ValueError: If the mask has another shape than the tokens.
        """
        if mask is None:
            mask = hidden_states.new_ones(hidden_states.shape[:-1])
        if mask.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"the mask has shape {tuple(mask.shape)}, but hidden states {tuple(hidden_states.shape)} are of "
                f"{tuple(hidden_states.shape[:-1])} tokens. Pass one value per token."
            )
        selected = mask != 0
        total = at_least_fp32(hidden_states).masked_fill(~selected.unsqueeze(-1), 0.0).sum(-2)  # (batch, hidden_size)
        counts = selected.sum(-1, keepdim=True).to(total.dtype)
        total, counts = self._sum_over_parts(torch.cat((total, counts), -1)).split([total.shape[-1], 1], -1)
        return (total / counts.clamp(min=1)).to(hidden_states.dtype)


def _unchanged(own: torch.Tensor) -> torch.Tensor:
    return own


class _SumOverRanks(torch.autograd.Function):
    """Sums over the ranks of a group; and so do gradients, see [Note: outputs of whole sequences]."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401  # takes what is put on it
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _pool(mean: TokenMean, hidden_states: torch.Tensor, shared: SequencePoolingHeadShared) -> torch.Tensor:
    return hidden_states if shared.pooling_mask is None else mean(hidden_states, shared.pooling_mask)


class ClassificationHead(TaskHead[SequencePoolingHeadShared, SequenceClassificationOutput]):
    """Scores labels of sequences, or of tokens: pooling, dropout, a linear layer without bias.

    Args:
        hidden_size: Size of the hidden states.
        num_labels: Number of scores.
        dropout: Probability with which a pooled value is dropped in training.
    """

    def __init__(self, hidden_size: int, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.pooling = TokenMean()
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(hidden_size, num_labels, bias=False)

    def forward(self, hidden_states: torch.Tensor, shared: SequencePoolingHeadShared) -> SequenceClassificationOutput:
        """Compute the scores."""
        pooled = _pool(self.pooling, hidden_states, shared)
        return SequenceClassificationOutput(scores=self.score(self.dropout(pooled)))

    def reset_parameters(self) -> None:
        """Initialise the layer as `nn.Linear` does."""
        self.score.reset_parameters()


class EmbeddingHead(TaskHead[SequencePoolingHeadShared, SequenceEmbeddingOutput]):
    """Gives one vector per sequence, or per token: pooling, maybe a linear layer without bias, maybe normalisation.

    Args:
        hidden_size: Size of the hidden states.
        embedding_dim: Size of the vectors; None to leave them as pooled, without a layer.
        normalize: Whether vectors are scaled to length one.
    """

    def __init__(self, hidden_size: int, embedding_dim: int | None, normalize: bool) -> None:
        super().__init__()
        self.pooling = TokenMean()
        self.projection = None if embedding_dim is None else nn.Linear(hidden_size, embedding_dim, bias=False)
        self._normalize = normalize

    def forward(self, hidden_states: torch.Tensor, shared: SequencePoolingHeadShared) -> SequenceEmbeddingOutput:
        """Compute the vectors."""
        pooled = _pool(self.pooling, hidden_states, shared)
        projected = pooled if self.projection is None else self.projection(pooled)
        return SequenceEmbeddingOutput(embeddings=F.normalize(projected, dim=-1) if self._normalize else projected)

    def reset_parameters(self) -> None:
        """Initialise the layer, if there is one, as `nn.Linear` does."""
        if self.projection is not None:
            self.projection.reset_parameters()
