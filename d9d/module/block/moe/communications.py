"""Bring tokens to their experts and back.

Axes: N tokens, K experts of a token, S = N * K slots, E experts, H hidden size.
"""

import abc
from typing import Any, cast

import torch

from .grouped_mm import ExpertTokenGroups


class ExpertCommunicationHandler(abc.ABC):
    """Brings tokens to their experts and outputs back; `dispatch` and `combine` are called in turns."""

    @abc.abstractmethod
    def dispatch(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertTokenGroups]:
        """Bring each token to its experts.

        Shapes:
            Tokens ``(N, H)``, ids and weights ``(N, K)``; results: slots ``(S', H)`` in the order of the experts that
            are here, the weight of each slot ``(S',)``, and how many slots each of them has. S' is how many slots came
            here, maybe from other ranks.

        Args:
            hidden_states: Tokens of this rank.
            topk_ids: Experts of each token, counted over all ranks.
            topk_weights: Weights of their outputs.
        """

    @abc.abstractmethod
    def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Bring outputs back to where the tokens came from, and sum them per token.

        Shapes:
            ``(S', H)``, in the order that `dispatch` gave, to ``(N, H)``.

        Args:
            hidden_states: Outputs of experts, already weighted.
        """


class NoCommunicationHandler(ExpertCommunicationHandler):
    """Sorts tokens by expert on this device, where all experts are.

    Sums take a token's experts in a fixed order, so forward and backward give the same bits in every run.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        # What `combine` needs of the last `dispatch`: the slots in sorted order, and K.
        self._sent: tuple[torch.Tensor, int] | None = None

    def dispatch(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertTokenGroups]:
        """Sort slots by expert, tokens in their order within each."""
        order, counts = sort_by_expert(topk_ids, self._num_experts)
        num_choices = topk_ids.shape[1]
        self._sent = (order, num_choices)
        return gather_slots(hidden_states, order, num_choices), topk_weights.flatten()[order], ExpertTokenGroups(counts)

    def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum the outputs of each token.

        Raises:
            RuntimeError: If there was no `dispatch` since the last call.
        """
        if self._sent is None:
            raise RuntimeError("combine was called without a dispatch before it. Call them in turns.")
        (order, num_choices), self._sent = self._sent, None
        return sum_slots(hidden_states, order, num_choices)


def sort_by_expert(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order slots by expert, tokens in their order within each.

    Shapes:
        ``(N, K)`` to ``(S,)``, as `gather_slots` takes it, and ``(E,)``: how many slots each expert has.

    Args:
        topk_ids: Experts of each token.
        num_experts: E.
    """
    sorted_ids, order = topk_ids.flatten().sort(stable=True)  # (S,)
    experts = torch.arange(num_experts, device=sorted_ids.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def gather_slots(tokens: torch.Tensor, order: torch.Tensor, num_choices: int) -> torch.Tensor:
    """Copy each token to its slots.

    Shapes:
        ``(N, ...)`` to ``(S, ...)``.

    Args:
        tokens: Tokens.
        order: ``(S,)``, a permutation: which slot, as ``token * K + choice``, stands at each place.
        num_choices: K.
    """
    # Autograd functions are untyped.
    return cast(torch.Tensor, _GatherSlots.apply(tokens, order, num_choices))


def sum_slots(slots: torch.Tensor, order: torch.Tensor, num_choices: int) -> torch.Tensor:
    """Sum the slots of each token: the transpose of `gather_slots`.

    Shapes:
        ``(S, ...)`` to ``(N, ...)``.

    Args:
        slots: Slots, in the order of `gather_slots`.
        order: As there.
        num_choices: K.
    """
    # Autograd functions are untyped.
    return cast(torch.Tensor, _SumSlots.apply(slots, order, num_choices))


class _GatherSlots(torch.autograd.Function):
    """Torch's own gradient of a gather adds in the order in which threads come (`index_add` on accelerators)."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, num_choices: int) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(order)
        ctx.num_choices = num_choices
        return tokens.index_select(0, order // num_choices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        return sum_slots(grad, order, ctx.num_choices), None, None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, order: torch.Tensor, num_choices: int) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(order)
        ctx.num_choices = num_choices
        by_token = torch.empty_like(slots).index_copy_(0, order, slots)
        num_tokens = order.shape[0] // num_choices
        return by_token.view(num_tokens, num_choices, *slots.shape[1:]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        return gather_slots(grad, order, ctx.num_choices), None, None
