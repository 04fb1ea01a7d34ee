"""Losses of routers, and the update of their biases. Axes: B sequences, T tokens, E experts, K experts of a token."""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from d9d.core.side_loss import attach_side_loss

from .router import RoutingResult


class RouterLossParameters(BaseModel):
    """Describes what a router is trained for besides the loss of the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load_balancing: NonNegativeFloat = 0.0
    """Coefficient of the load balancing loss; 0.01 in the paper of Switch Transformers, 1e-4 in that of DeepSeek-V3."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the router z-loss; 0.001 in the paper of ST-MoE."""
    scope: Literal["sequence", "microbatch"] = "sequence"
    """Over which tokens loads are balanced. Sequences do not depend on how a batch is cut into microbatches and ranks."""


def load_balancing_loss(probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``E * sum_e(f_e * P_e)`` for each sequence: 1 for equal loads, up to E / K for the most unequal ones.

    f is the part of a sequence's choices that fell on an expert, and has no gradient. P is the mean probability of the
    expert over its tokens.

    Shapes:
        ``(B, T, E)`` and ``(B, E)`` to ``(B,)``.

    Args:
        probabilities: Probabilities of all experts, which add up to 1 for each token.
        counts: How often each expert was chosen; of more tokens than these where a sequence is on several ranks.

    Source: "Switch Transformers", https://arxiv.org/abs/2101.03961, equation 4, for tokens with K experts and for
    each sequence as in "DeepSeek-V3", https://arxiv.org/abs/2412.19437, equations 17 to 20.
    """
    _, num_tokens, num_experts = probabilities.shape
    # Counts are integers, whose quotient would be in fp32 only.
    shares = counts.to(probabilities.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    means = probabilities.sum(1) / max(num_tokens, 1)  # (B, E)
    return num_experts * (shares * means).sum(-1)


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of ``logsumexp(logits) ** 2``, which keeps logits small.

    Shapes:
        ``(N, E)`` to one value.

    Source: "ST-MoE", https://arxiv.org/abs/2202.08906, equation 5.
    """
    log_sums = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
    return log_sums.square().sum() / max(len(log_sums), 1)


class RouterLosses:
    """Adds the losses of a router to whatever a model is trained for.

    [Note: what router losses count for]
    The loss of a step is a weighted mean over microbatches, and the one of a router is a part of each microbatch's loss:
    the mean over its sequences (or tokens, for the z-loss). So the step has ``sum(weight * router loss) / sum(weight)``,
    which for sequences of equal weight is the mean over all of them, whatever ranks and microbatches they are on. With the
    scope "microbatch" loads are those of the tokens that a rank has at a time, and the loss depends on how many that are;
    with a group, of those of all its ranks.

    Args:
        params: Coefficients and scope.
        group: Ranks over which loads are counted: those of context parallelism, which have parts of the same sequences; or
            with the scope "microbatch", all ranks with other data (source: "Demons in the Detail",
            https://arxiv.org/abs/2501.11873, section 3). All must then call the layer equally often.
    """

    def __init__(self, params: RouterLossParameters, group: dist.ProcessGroup | None = None) -> None:
        self._params = params
        self._group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "RouterLosses":
        """Return the losses of a copy of the layer; groups can not be copied."""
        return RouterLosses(self._params, self._group)

    def attach(self, output: torch.Tensor, routing: RoutingResult) -> torch.Tensor:
        """Return the same output of the layer, whose backward pass trains the router as well.

        Shapes:
            ``(..., T, H)``; routing of as many tokens.
        """
        if not torch.is_grad_enabled():
            return output
        return attach_side_loss(output, self._loss(routing, math.prod(output.shape[:-2]), output.shape[-2]))

    def _loss(self, routing: RoutingResult, num_sequences: int, num_tokens: int) -> torch.Tensor:
        loss = routing.logits.new_zeros((), dtype=routing.probabilities.dtype)
        if self._params.z_loss:
            loss = loss + self._params.z_loss * router_z_loss(routing.logits)
        if self._params.load_balancing:
            if self._params.scope == "microbatch":
                num_sequences, num_tokens = 1, num_sequences * num_tokens
            probabilities = routing.probabilities.view(num_sequences, num_tokens, routing.probabilities.shape[-1])
            # Scores of other functions than softmax do not add up to 1. The number is that of the router.
            probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + 1e-20)
            losses = load_balancing_loss(probabilities, self._count(routing, num_sequences, num_tokens))
            loss = loss + self._params.load_balancing * losses.sum() / max(num_sequences, 1)
        return loss

    @torch.no_grad()
    def _count(self, routing: RoutingResult, num_sequences: int, num_tokens: int) -> torch.Tensor:
        indices = routing.selected_expert_indices
        indices = indices.view(num_sequences, num_tokens * indices.shape[-1])
        counts = indices.new_zeros(num_sequences, routing.probabilities.shape[-1])
        counts.scatter_add_(1, indices, torch.ones_like(indices))
        if self._group is not None and self._group.size() > 1:
            dist.all_reduce(counts, group=self._group)
        return counts  # (B, E)
