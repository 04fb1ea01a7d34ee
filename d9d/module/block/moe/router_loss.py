"""Losses of routers, and the update of their biases. Axes: B sequences, T tokens, E experts, K experts of a token."""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import ConfigDict, NonNegativeFloat

from d9d.core.config import Config
from d9d.core.side_loss import attach_side_loss, expect_side_loss

from .router import RoutingResult


class RouterLossParameters(Config):
    """Describes what a router is trained for besides the loss of the model."""

    model_config = ConfigDict(frozen=True)

    load_balancing: NonNegativeFloat = 0.0
    """Coefficient of the load balancing loss; 0.01 in the paper of Switch Transformers, 1e-4 in that of DeepSeek-V3."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the router z-loss; 0.001 in the paper of ST-MoE."""
    scope: Literal["sequence", "microbatch"] = "sequence"
    """Over which tokens loads are balanced. Sequences do not depend on how a batch is cut into microbatches and ranks."""


def load_balancing_loss(
    probabilities: torch.Tensor, counts: torch.Tensor, num_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``E * sum_e(f_e * P_e)`` for each sequence: 1 for equal loads, up to E / K for the most unequal ones.

    f is the part of a sequence's choices that fell on an expert, and has no gradient. P is the mean probability of the
    expert over its tokens.

    Shapes:
        ``(B, T, E)`` and ``(B, E)`` to ``(B,)``.

    Args:
        probabilities: Probabilities of all experts, which add up to 1 for each token, or to 0 for those that do not count.
        counts: How often each expert was chosen; of more tokens than these where a sequence is on several ranks.
        num_tokens: ``(B,)``: what sums over tokens are divided by; T by default.

    Source: "Switch Transformers", https://arxiv.org/abs/2101.03961, equation 4, for tokens with K experts and for
    each sequence as in "DeepSeek-V3", https://arxiv.org/abs/2412.19437, equations 17 to 20.
    """
    _, all_tokens, num_experts = probabilities.shape
    # Counts are integers, whose quotient would be in fp32 only.
    shares = counts.to(probabilities.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    divisor = max(all_tokens, 1) if num_tokens is None else num_tokens.unsqueeze(-1)
    means = probabilities.sum(1) / divisor  # (B, E)
    return num_experts * (shares * means).sum(-1)


def router_z_loss(logits: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over tokens of ``logsumexp(logits) ** 2``, which keeps logits small.

    Shapes:
        ``(N, E)`` to one value.

    Args:
        logits: Those of all experts.
        weights: ``(N,)``: what each token counts for in the sum; 1 / N by default.

    Source: "ST-MoE", https://arxiv.org/abs/2202.08906, equation 5.
    """
    squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
    return squares.sum() / max(len(squares), 1) if weights is None else (squares * weights).sum()


class RouterLosses:
    """Adds the losses of a router to whatever a model is trained for.

    [Note: what router losses count for]
    The loss of a step is a weighted mean over microbatches, and the one of a router is a part of each microbatch's loss:
    the mean over its sequences (or tokens, for the z-loss). So the step has ``sum(weight * router loss) / sum(weight)``,
    which for sequences of equal weight is the mean over all of them, whatever ranks and microbatches they are on. With the
    scope "microbatch" loads are those of the tokens that a rank has at a time, and the loss depends on how many that are;
    with a group, of those of all its ranks.

    Context-parallel ranks have parts of one microbatch. Loads are counted over all parts, and sums over tokens are divided by
    the mean number of tokens of a part, so that for parts of equal weight the step has the loss of whole sequences.

    Tokens that a mask leaves out, such as padding, do not count, and neither do sequences without any other.

    Args:
        params: Coefficients and scope; with both coefficients 0 there are no losses.
        group: With the scope "microbatch", ranks over which loads are counted: all with other data (source: "Demons in the
            Detail", https://arxiv.org/abs/2501.11873, section 3). All must then call the layer equally often. By default
            those of `context_group`.
        context_group: Ranks with parts of the same sequences; None for this one alone.

    Raises:
        ValueError: If a group is given with the scope "sequence", as other ranks have other sequences.
    """

    def __init__(
        self,
        params: RouterLossParameters,
        group: dist.ProcessGroup | None = None,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        if params.scope == "sequence" and group is not None and group.size() > 1:
            raise ValueError(
                f"loads of scope 'sequence' are not counted over a group (of {group.size()} ranks). Leave it out: "
                "parallelize_context tells layers which ranks have parts of the same sequences. To balance loads over more "
                "than a sequence, set scope to 'microbatch'."
            )
        self._params = params
        self._group = group
        self._context_group = context_group

    @property
    def context_parallel_degree(self) -> int | None:
        """Over how many ranks loads of a sequence are counted; None where there is nothing to count for. See `MixesTokens`."""
        if self._context_group is not None:
            return self._context_group.size()
        return 1 if self._has_losses else None

    @property
    def _has_losses(self) -> bool:
        return bool(self._params.load_balancing or self._params.z_loss)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RouterLosses":
        """Return itself, for copies of the layer: nothing in it changes, and groups can not be copied."""
        return self

    def with_params(self, params: RouterLossParameters, group: dist.ProcessGroup | None) -> "RouterLosses":
        """Return losses with other coefficients, for the same parts of sequences."""
        return RouterLosses(params, group, self._context_group)

    def with_context_group(self, context_group: dist.ProcessGroup) -> "RouterLosses":
        """Return the same losses, of sequences whose parts are on the ranks of a group."""
        return RouterLosses(self._params, self._group, context_group)

    def attach(self, output: torch.Tensor, routing: RoutingResult, token_mask: torch.Tensor | None) -> torch.Tensor:
        """Return the same output of the layer, whose backward pass trains the router as well.

        Shapes:
            ``(..., T, H)``; routing of as many tokens; mask ``(..., T)``.
        """
        if not self._has_losses:
            return output
        if not torch.is_grad_enabled():
            expect_side_loss()
            return output
        is_counted = output.new_ones(output.shape[:-1], dtype=torch.bool) if token_mask is None else token_mask != 0
        num_sequences = 1 if self._params.scope == "microbatch" else math.prod(output.shape[:-2])
        is_counted = is_counted.reshape(num_sequences, is_counted.numel() // max(num_sequences, 1))
        return attach_side_loss(output, self._loss(routing, is_counted))

    def _loss(self, routing: RoutingResult, is_counted: torch.Tensor) -> torch.Tensor:
        """Compute the loss of one call; which tokens count is ``(B, T)``."""
        probabilities, indices = routing.probabilities, routing.selected_expert_indices
        own_loads = _count(indices, is_counted, probabilities.shape[-1])
        loads = _summed(own_loads, self._context_group)
        num_parts = 1 if self._context_group is None else self._context_group.size()
        num_tokens = loads.sum(-1).to(probabilities.dtype) / (indices.shape[-1] * num_parts)  # (B,), the mean of a part
        smallest = 1 / num_parts  # but for 0, where all that is divided by it is 0
        loss = probabilities.new_zeros(())
        if self._params.z_loss:
            weights = is_counted.flatten() / num_tokens.sum().clamp(min=smallest)
            loss = loss + self._params.z_loss * router_z_loss(routing.logits, weights)
        if self._params.load_balancing:
            # Scores of other functions than softmax do not add up to 1. The number is that of the router.
            probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + 1e-20)
            probabilities = probabilities * is_counted.view(-1, 1)
            probabilities = probabilities.view(*is_counted.shape, loads.shape[-1])  # (B, T, E)
            if self._group is not None:
                loads = _summed(own_loads, self._group)
            losses = load_balancing_loss(probabilities, loads, num_tokens.clamp(min=smallest))
            loss = loss + self._params.load_balancing * losses.sum() / (num_tokens > 0).sum().clamp(min=1)
        return loss


@torch.no_grad()
def _count(indices: torch.Tensor, is_counted: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count how often tokens of each sequence have chosen each expert: ``(N, K)`` and ``(B, T)`` to ``(B, E)``."""
    num_sequences, num_tokens = is_counted.shape
    chosen = indices.view(num_sequences, num_tokens * indices.shape[-1])
    counts = chosen.new_zeros(num_sequences, num_experts)
    return counts.scatter_add_(1, chosen, is_counted.repeat_interleave(indices.shape[-1], 1).to(counts.dtype))


@torch.no_grad()
def _summed(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum over the ranks of a group, as a tensor of its own."""
    if group is None or group.size() == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total
