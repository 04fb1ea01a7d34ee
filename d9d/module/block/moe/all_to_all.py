"""Bring tokens to the experts of other ranks by all-to-all.

Axes: N tokens, K experts of a token, S = N * K slots sent, S' slots received, E experts, R ranks, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from d9d.core.dist_ops import exchange_rows

from .communications import ExpertCommunicationHandler, gather_slots, sort_by_expert, sum_slots
from .grouped_mm import ExpertTokenGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What `combine` needs of the last `dispatch`."""

    order: torch.Tensor
    """``(S,)``: which slot stands at each place, in the order of all experts."""
    num_choices: int
    """K."""
    received_order: torch.Tensor
    """``(S',)``: which of the received slots stands at each place, in the order of the experts of this rank."""
    num_sent: tuple[int, ...]
    """Slots sent to each rank."""
    num_received: tuple[int, ...]
    """Slots received from each rank."""


class AllToAllCommunicationHandler(ExpertCommunicationHandler):
    """Sorts tokens by expert, sends them to the rank that holds it, and brings outputs back the same way.

    Nothing is dropped or padded: ranks send and receive as many slots as there are, none included. All ranks of the
    group must call `dispatch` and `combine`, and the backward passes of both, in the same order. `dispatch` blocks the
    host until the counts of slots are known. Runs on every backend with an all-to-all of uneven parts (gloo, NCCL).

    Slots of an expert stand in the order of ranks, and of tokens within each, so results are the same in every run.

    Args:
        num_experts: E. Rank r of the group holds experts ``r * E / R`` to ``(r + 1) * E / R``.
        group: The R ranks.

    Raises:
        ValueError: If the group does not divide the number of experts.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        check_expert_parallel(num_experts, group.size())
        self._num_experts = num_experts
        self._group = group
        self._sent: _Sent | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "AllToAllCommunicationHandler":
        """Return a handler for a copy of the layer; groups can not be copied."""
        return AllToAllCommunicationHandler(self._num_experts, self._group)

    def dispatch(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertTokenGroups]:
        """Send slots to the ranks of their experts, and sort what came by expert."""
        num_choices = topk_ids.shape[1]
        order, counts = sort_by_expert(topk_ids, self._num_experts)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self._group)
        # One copy of both: the host waits for the device once.
        host_counts = torch.stack((counts, received_counts)).cpu().view(2, self._group.size(), -1)  # (2, R, E / R)
        num_sent, num_received = (tuple(row) for row in host_counts.sum(-1).tolist())
        received_order = _order_by_expert(received_counts.view(self._group.size(), -1), sum(num_received))
        slots, weights = _exchange(
            (gather_slots(hidden_states, order, num_choices), topk_weights.flatten()[order]),
            num_sent,
            num_received,
            self._group,
        )
        self._sent = _Sent(
            order=order,
            num_choices=num_choices,
            received_order=received_order,
            num_sent=num_sent,
            num_received=num_received,
        )
        local_counts = received_counts.view(self._group.size(), -1).sum(0)
        groups = ExpertTokenGroups(local_counts, host_counts[1].sum(0))
        return gather_slots(slots, received_order, 1), gather_slots(weights, received_order, 1), groups

    def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send outputs back, and sum those of each token in the order of its choices.

        Raises:
            RuntimeError: If there was no `dispatch` since the last call.
        """
        if self._sent is None:
            raise RuntimeError("combine was called without a dispatch before it. Call them in turns.")
        sent, self._sent = self._sent, None
        by_rank = sum_slots(hidden_states, sent.received_order, 1)
        (slots,) = _exchange((by_rank,), sent.num_received, sent.num_sent, self._group)
        return sum_slots(slots, sent.order, sent.num_choices)


def check_expert_parallel(num_experts: int, num_ranks: int) -> None:
    """Refuse a number of ranks that can not hold equal parts of the experts.

    Raises:
        ValueError: With the numbers that can.
    """
    if num_experts % num_ranks:
        valid = [str(degree) for degree in range(1, num_experts + 1) if num_experts % degree == 0]
        raise ValueError(
            f"{num_experts} experts can not be shared evenly by {num_ranks} ranks. "
            f"Set expert_parallel to one of {', '.join(valid)}."
        )


def _order_by_expert(counts: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return which of the slots, which stand by rank and expert, comes at each place by expert and rank.

    Shapes:
        ``(R, E / R)`` to ``(S',)``.
    """
    num_ranks, num_experts = counts.shape
    experts = torch.arange(num_experts, device=counts.device).repeat(num_ranks)
    # With the output size given, the host need not wait for the counts.
    return experts.repeat_interleave(counts.flatten(), output_size=num_slots).argsort(stable=True)


def _exchange(
    tensors: Sequence[torch.Tensor],
    num_sent: tuple[int, ...],
    num_received: tuple[int, ...],
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Exchange the rows of several tensors, see `exchange_rows`, with gradients that go back the same way."""
    # Autograd functions are untyped.
    return cast("tuple[torch.Tensor, ...]", _ExchangeRows.apply(num_sent, num_received, group, *tensors))


class _ExchangeRows(torch.autograd.Function):
    """One node for all tensors of a dispatch: autograd could reach two in another order on another rank."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # takes what is put on it
        num_sent: tuple[int, ...],
        num_received: tuple[int, ...],
        group: dist.ProcessGroup,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.num_sent, ctx.num_received, ctx.group = num_sent, num_received, group
        return tuple(exchange_rows(tensor, num_sent, num_received, group) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[3:]
        wanted = [grad for grad, is_needed in zip(grads, needed, strict=True) if is_needed]
        back = iter(_exchange(wanted, ctx.num_received, ctx.num_sent, ctx.group))
        return None, None, None, *(next(back) if is_needed else None for is_needed in needed)
