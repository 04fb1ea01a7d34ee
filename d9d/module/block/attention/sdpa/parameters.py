"""What an attention layer asks of an implementation, and what all implementations share.

Axes: B batch, Hq query heads, Hk key and value heads, Tq and Tk tokens, D dimensions of a head.
"""

from dataclasses import dataclass

import torch
from torch import nn

from d9d.module.base import ModuleLateInit


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaParameters:
    """Properties of an attention layer that do not change from call to call."""

    num_sinks: int | None
    """Number of query heads, if each has a learned logit that takes part in the softmax and has no value, else None."""
    window_size: tuple[int | None, int | None] = (None, None)
    """How many tokens before and after its own a query sees; None for no limit."""
    needs_attention_mask: bool = False
    """Whether calls pass a mask, which some kernels can not take."""

    def __post_init__(self) -> None:
        """Refuse negative sizes."""
        if any(size is not None and size < 0 for size in self.window_size):
            raise ValueError(
                f"window_size {self.window_size} has a negative limit. Give the number of tokens before and after a "
                "query's own, or None for no limit."
            )
        if self.num_sinks is not None and self.num_sinks <= 0:
            raise ValueError(f"num_sinks ({self.num_sinks}) must be the number of query heads, or None for no sinks.")


class AttentionSinks(nn.Module, ModuleLateInit):
    """One learned logit per query head, to which attention can go that no token deserves.

    Source:
        https://arxiv.org/abs/2309.17453; learned as in gpt-oss.

    Args:
        num_heads: Number of query heads.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def forward(self, num_heads: int) -> torch.Tensor:
        """Return the logits, ``(Hq,)``.

        Raises:
            ValueError: If queries have another number of heads.
        """
        if num_heads != self.logits.shape[0]:
            raise ValueError(
                f"queries have {num_heads} heads, but there are {self.logits.shape[0]} sinks. Set num_sinks to {num_heads}."
            )
        return self.logits

    def reset_parameters(self) -> None:
        """Make them zero: as much as a key at a right angle to the query."""
        nn.init.zeros_(self.logits)


def num_groups(query_states: torch.Tensor, key_states: torch.Tensor) -> int:
    """Return how many query heads share a key head.

    Raises:
        ValueError: If they can not be shared evenly.
    """
    num_query_heads, num_key_heads = query_states.shape[-3], key_states.shape[-3]
    if num_key_heads == 0 or num_query_heads % num_key_heads:
        raise ValueError(
            f"{num_query_heads} query heads can not share {num_key_heads} key heads evenly. "
            "Choose a number of key heads that divides the number of query heads."
        )
    return num_query_heads // num_key_heads


def visibility(
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    window_size: tuple[int | None, int | None],
    device: torch.device,
) -> torch.Tensor | None:
    """Return which keys the queries see, or None if all see all.

    The last query stands at the position of the last key, also if there are fewer queries than keys.

    Shapes:
        ``(Tq, Tk)``, true where a query sees a key.

    Args:
        num_queries: Tq.
        num_keys: Tk.
        is_causal: Whether queries see no later keys.
        window_size: As in `SdpaParameters`.
        device: Where to build it.
    """
    return visible_at(
        torch.arange(num_keys - num_queries, num_keys, device=device),
        torch.arange(num_keys, device=device),
        is_causal,
        window_size,
    )


def visible_at(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    is_causal: bool,
    window_size: tuple[int | None, int | None],
) -> torch.Tensor | None:
    """Return which keys the queries at given positions see, or None if all see all.

    Shapes:
        ``(Tq)`` and ``(Tk)`` to ``(Tq, Tk)``, true where a query sees a key.

    Args:
        query_positions: Places of the queries in the sequence.
        key_positions: Places of the keys.
        is_causal: Whether queries see no later keys.
        window_size: As in `SdpaParameters`.
    """
    before, after = window_size
    if is_causal:
        after = 0
    if before is None and after is None:
        return None
    distance = key_positions - query_positions.unsqueeze(1)  # (Tq, Tk)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if before is not None:
        visible &= distance >= -before
    if after is not None:
        visible &= distance <= after
    return visible


def combine_masks(visible: torch.Tensor | None, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Join what positions allow with the mask of a call.

    Shapes:
        `visible` ``(Tq, Tk)``; the mask has four axes that broadcast to ``(B, Hq, Tq, Tk)``, and so has the result.

    Args:
        visible: True where a query sees a key; None for everywhere.
        attention_mask: True where a query sees a key, or a floating point term for the logits; None for everywhere.

    Raises:
        ValueError: If the mask holds integers, which could be meant either way, or has other than four axes: one of two
            could be meant for batch and keys, and would broadcast over queries and keys.
    """
    if attention_mask is None:
        return visible
    if attention_mask.ndim != 4:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but must broadcast to (batch, heads, queries, keys) "
            "axis by axis. Pass mask[:, None, None, :] for padding, mask[None, None] for one of queries and keys."
        )
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask has dtype {attention_mask.dtype}. Pass booleans (true: may be seen), as from "
            "`mask.bool()`, or floating point terms that are added to the logits."
        )
    if visible is None:
        return attention_mask
    if attention_mask.dtype == torch.bool:
        return visible & attention_mask
    return attention_mask.masked_fill(~visible, -torch.inf)
