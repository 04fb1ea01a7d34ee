"""Rotate queries and keys by their positions.

Axes: B batch, H heads, T tokens, D dimensions of a head, R those of them that are rotated (R <= D).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Self

import torch
from torch import nn

from d9d.module.base import ModuleLateInit

from .scaling import NoRopeScaling, RopeScaling


class RotaryEmbeddingStyle(StrEnum):
    """Which dimensions of a head form a pair that is rotated together."""

    HALF = "half"
    """Dimension i and dimension i + R/2 (Llama, Qwen)."""
    INTERLEAVED = "interleaved"
    """Dimension 2i and dimension 2i + 1 (GPT-J, DeepSeek)."""


class RotaryEmbeddingProvider(nn.Module, ModuleLateInit):
    """Gives cosines and sines of the angles of given positions.

    They come from a table, which is computed in fp64 and rounded once to the dtype of the module: neither autocast nor
    ``module.to(dtype)`` makes far positions coarser than that dtype is.

    Args:
        rope_base: Base of the geometric series of wavelengths ("theta").
        head_dim: Number of dimensions that are rotated, R; even.
        max_position_ids: Positions are below this number. The table takes ``max_position_ids * head_dim`` elements.
        style: Layout of the results, which is that of the applicator.
        rope_scaling: How frequencies are stretched; by default not at all.

    Raises:
        ValueError: If a size is not positive, or `head_dim` is odd.
    """

    cos_table: torch.Tensor
    sin_table: torch.Tensor

    def __init__(
        self,
        rope_base: float,
        head_dim: int,
        max_position_ids: int,
        style: RotaryEmbeddingStyle,
        rope_scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        if head_dim <= 0 or head_dim % 2:
            raise ValueError(f"head_dim ({head_dim}) must be positive and even: dimensions are rotated in pairs.")
        if max_position_ids <= 0 or rope_base <= 0:
            raise ValueError(
                f"max_position_ids ({max_position_ids}) and rope_base ({rope_base}) must be positive. "
                "Pass the longest sequence, in tokens, and the model's theta."
            )
        self._rope_base = rope_base
        self._style = style
        self._scaling = NoRopeScaling() if rope_scaling is None else rope_scaling
        for name in ("cos_table", "sin_table"):
            self.register_buffer(name, torch.empty(max_position_ids, head_dim // 2), persistent=False)
        self.reset_parameters()

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions.

        Shapes:
            ``(B, T)`` integers to twice ``(B, T, R)``, in the dtype of the module.

        Raises:
            IndexError: On CPU, if a position is negative or not below `max_position_ids`; on an accelerator its own
                assertion fails.
        """
        return self._spread(self.cos_table[position_ids]), self._spread(self.sin_table[position_ids])

    def _spread(self, per_pair: torch.Tensor) -> torch.Tensor:
        """Give each dimension the value of its pair: ``(..., R/2)`` to ``(..., R)``."""
        match self._style:
            case RotaryEmbeddingStyle.HALF:
                return torch.cat((per_pair, per_pair), dim=-1)
            case RotaryEmbeddingStyle.INTERLEAVED:
                return per_pair.repeat_interleave(2, dim=-1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the table anew."""
        num_positions, num_pairs = self.cos_table.shape
        frequencies = self._scaling.inverse_frequencies(self._rope_base, 2 * num_pairs).double().cpu()
        positions = torch.arange(num_positions, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies)
        scale = self._scaling.attention_mscale
        self.cos_table.copy_((angles.cos() * scale).to(self.cos_table.dtype))
        self.sin_table.copy_((angles.sin() * scale).to(self.sin_table.dtype))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # What `to`, `half`, `double` and the like call. A table that was rounded before can not become finer again.
        dtype_before = self.cos_table.dtype
        super()._apply(fn, recurse)
        if self.cos_table.dtype != dtype_before:
            self.reset_parameters()
        return self


class RotaryEmbeddingApplicator(nn.Module):
    """Rotates queries and keys.

    Where cosines are given for fewer dimensions than a head has, the first R are rotated and the rest stays. Products
    are computed in the wider of both dtypes; results have the dtypes of queries and keys.

    Args:
        style: Which dimensions form a pair.
    """

    def __init__(self, style: RotaryEmbeddingStyle) -> None:
        super().__init__()
        self._style = style

    def forward(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        position_embedding_cos: torch.Tensor,
        position_embedding_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by the angles of their positions.

        Shapes:
            Queries ``(B, Hq, T, D)``, keys ``(B, Hk, T, D)``, cosines and sines ``(B, T, R)``; results as the first
            two. Any further axis that broadcasts may stand in place of B.

        Raises:
            ValueError: If more dimensions are to be rotated than a head has.
        """
        cos, sin = position_embedding_cos.unsqueeze(-3), position_embedding_sin.unsqueeze(-3)  # (B, 1, T, R)
        return self._rotate(query_states, cos, sin), self._rotate(key_states, cos, sin)

    def _rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        head_dim, rope_dim = states.shape[-1], cos.shape[-1]
        if rope_dim > head_dim:
            raise ValueError(
                f"{rope_dim} dimensions are to be rotated, but heads have {head_dim}. "
                "Build the RotaryEmbeddingProvider with a head_dim of at most that."
            )
        turned = states[..., :rope_dim]
        rotated = (turned * cos + self._quarter_turn(turned) * sin).to(states.dtype)
        if rope_dim == head_dim:
            return rotated
        return torch.cat((rotated, states[..., rope_dim:]), dim=-1)

    def _quarter_turn(self, states: torch.Tensor) -> torch.Tensor:
        """Make each pair (x, y) the pair (-y, x)."""
        match self._style:
            case RotaryEmbeddingStyle.HALF:
                x, y = states.chunk(2, dim=-1)
                return torch.cat((-y, x), dim=-1)
            case RotaryEmbeddingStyle.INTERLEAVED:
                x, y = states[..., 0::2], states[..., 1::2]
                return torch.stack((-y, x), dim=-1).flatten(-2)
