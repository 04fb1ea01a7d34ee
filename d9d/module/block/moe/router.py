"""Choose the experts of each token. Axes: N tokens, E experts, K experts of a token."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from d9d.kernel.precision import at_least_fp32
from d9d.module.base import ModuleLateInit

from .routing import RoutingParameters, check_group_limit, limit_to_groups, score_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """The experts of each token, the most probable first."""

    selected_expert_indices: torch.Tensor
    """``(N, K)`` integers."""
    selected_probabilities: torch.Tensor
    """``(N, K)``, the weights of their outputs, in fp32 at least."""
    logits: torch.Tensor
    """``(N, E)``."""
    probabilities: torch.Tensor
    """``(N, E)``, those of all experts, in fp32 at least; without the bias, and not divided by anything."""


class TopKRouter(nn.Module, ModuleLateInit):
    """Scores experts with a linear layer and takes the best K.

    With an expert bias, each expert's score is shifted for the choice only, not for the weight of its output. The bias
    has no gradient; `update_expert_bias` moves it against the load (source: "Auxiliary-Loss-Free Load Balancing",
    https://arxiv.org/abs/2408.15664). It stays in fp32, since its steps are small.

    Args:
        dim: Size of a token.
        num_experts: E.
        top_k: K.
        renormalize_probabilities: Whether the K probabilities of a token are divided by their sum.
        enable_expert_bias: Whether there is a bias.
        routing: How experts are scored and chosen; by default by a softmax, among all.

    Raises:
        ValueError: If K is not between 1 and E, or experts can not be grouped as asked.
    """

    expert_bias: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        renormalize_probabilities: bool,
        enable_expert_bias: bool = False,
        *,
        routing: RoutingParameters | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k ({top_k}) must be between 1 and the number of experts ({num_experts}).")
        self._routing = RoutingParameters() if routing is None else routing
        if self._routing.group_limit is not None:
            check_group_limit(self._routing.group_limit, num_experts, top_k)
        self._top_k = top_k
        self._renormalizes = renormalize_probabilities
        self.gate = nn.Linear(dim, num_experts, bias=False)
        bias = torch.empty(num_experts, dtype=torch.float32) if enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def forward(self, hidden_states: torch.Tensor) -> RoutingResult:
        """Choose experts.

        Among equal scores `torch.topk` decides: the same for the same input on the same device, as when a layer is
        computed again for its backward pass.

        Shapes:
            ``(N, dim)``.
        """
        logits = self._logits(hidden_states)
        probabilities = score_experts(logits, self._routing.scoring)  # (N, E)
        scores = probabilities if self.expert_bias is None else probabilities + self.expert_bias
        if self._routing.group_limit is not None:
            scores = limit_to_groups(scores, self._routing.group_limit)
        indices = scores.topk(self._top_k, dim=-1).indices  # (N, K)
        selected = probabilities.gather(-1, indices)
        if self._renormalizes:
            # Sigmoids may all be zero. The number is that of the code published with DeepSeek-V3.
            selected = selected / (selected.sum(-1, keepdim=True) + 1e-20)
        selected = selected * self._routing.scaling_factor
        return RoutingResult(
            selected_expert_indices=indices,
            selected_probabilities=selected,
            logits=logits,
            probabilities=probabilities,
        )

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self._routing.has_wide_logits:
            # Beside experts that ranks share, the router stays out of FSDP and of its mixed precision.
            return self.gate(hidden_states.to(torch.promote_types(hidden_states.dtype, self.gate.weight.dtype)))
        device_type = hidden_states.device.type
        is_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
            return F.linear(at_least_fp32(hidden_states), at_least_fp32(self.gate.weight))

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: torch.Tensor, rate: float) -> None:
        """Raise the bias of experts with less than the mean load by `rate`, lower that of experts with more.

        Call it once per optimizer step, with counts summed over all ranks and microbatches of the step: biases must
        stay equal on all ranks.

        Args:
            tokens_per_expert: ``(E,)`` counts.
            rate: Size of the step; 0.001 in the paper.

        Raises:
            RuntimeError: If the router was built without bias.
        """
        if self.expert_bias is None:
            raise RuntimeError("this router has no expert bias. Build it with enable_expert_bias=True.")
        # In integers, whatever the counts: load times E against the sum.
        surplus = tokens_per_expert * tokens_per_expert.numel() - tokens_per_expert.sum()
        self.expert_bias -= rate * surplus.sign()

    def reset_parameters(self) -> None:
        """Initialise the layer as `nn.Linear` does, and the bias to zero."""
        self.gate.reset_parameters()
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # What `to`, `half` and the like call.
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()
        return self
