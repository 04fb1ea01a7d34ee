"""Pieces of collate functions."""

import enum
from collections.abc import Sequence

import torch
from torch.nn import functional

__all__ = ["PaddingSide1D", "TokenPoolingType", "pad_stack_1d", "token_pooling_mask_from_attention_mask"]


class PaddingSide1D(enum.StrEnum):
    """Names the side of a sequence that padding goes to."""

    left = "left"
    right = "right"


def pad_stack_1d(
    items: Sequence[torch.Tensor],
    pad_value: int,
    padding_side: PaddingSide1D = PaddingSide1D.right,
    pad_to_multiple_of: int | None = None,
) -> torch.Tensor:
    """Stack sequences of different lengths.

    Shapes:
        Each item (T_i,), result (B, T) with T the longest T_i, rounded up to a multiple of `pad_to_multiple_of`.

    Args:
        items: Sequences of one dtype and device, at least one.
        pad_value: Value to fill up with.
        padding_side: Where padding goes.
        pad_to_multiple_of: Round the length up to a multiple of this, such as the context-parallel degree.

    Raises:
        ValueError: There are no items, an item is not one-dimensional, or `pad_to_multiple_of` is below 1.
    """
    if not items:
        raise ValueError("there is nothing to stack: items is empty.")
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of ({pad_to_multiple_of}) must be at least 1.")
    for position, item in enumerate(items):
        if item.ndim != 1:
            raise ValueError(f"items[{position}] has shape {tuple(item.shape)}: only sequences (T,) can be stacked.")
    length = max(len(item) for item in items)
    if pad_to_multiple_of is not None:
        length = -(-length // pad_to_multiple_of) * pad_to_multiple_of
    side = PaddingSide1D(padding_side)
    return torch.stack([_pad(item, length - len(item), pad_value, side) for item in items])  # (B, T)


def _pad(item: torch.Tensor, num_missing: int, pad_value: int, side: PaddingSide1D) -> torch.Tensor:
    padding = (num_missing, 0) if side is PaddingSide1D.left else (0, num_missing)
    return functional.pad(item, padding, value=pad_value)


class TokenPoolingType(enum.StrEnum):
    """Names the tokens of a sequence that represent it."""

    first = "first"
    """The first token that is not padding, such as a [CLS] token."""
    last = "last"
    """The last token that is not padding."""
    all = "all"
    """All tokens that are not padding."""


def token_pooling_mask_from_attention_mask(
    attention_mask: torch.Tensor, pooling_type: TokenPoolingType
) -> torch.Tensor:
    """Mark the tokens of each sequence that represent it, on whichever side the padding is.

    Shapes:
        `attention_mask` (B, T) of 0 and 1, result (B, T) of the same dtype. A sequence of padding only has no mark.

    Args:
        attention_mask: 1 for tokens, 0 for padding.
        pooling_type: Which tokens to mark.

    Raises:
        ValueError: `attention_mask` is not two-dimensional.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}: it must be (B, T).")
    is_token = attention_mask != 0
    match TokenPoolingType(pooling_type):
        case TokenPoolingType.all:
            marked = is_token
        case TokenPoolingType.first:
            marked = is_token & (is_token.cumsum(dim=1) == 1)
        case TokenPoolingType.last:
            marked = is_token & (is_token.flip(1).cumsum(dim=1).flip(1) == 1)
    return marked.to(attention_mask.dtype)  # (B, T)
