"""Attention whose query heads share key and value heads.

Axes: B batch, T tokens, Hq query heads, Hk key and value heads, D dimensions of a head.
"""

import torch
from torch import nn

from d9d.module.base import ModuleLateInit
from d9d.module.block.normalization import RMSNorm
from d9d.module.block.positional import RotaryEmbeddingApplicator, RotaryEmbeddingStyle

from .sdpa import AnySdpaBackendConfig, SdpaParameters, build_sdpa_backend


class GroupedQueryAttention(nn.Module, ModuleLateInit):
    """Grouped-query attention with rotary positions, as in Llama, Qwen3 and Qwen3-Next.

    Source:
        https://arxiv.org/abs/2305.13245; the output gate: https://arxiv.org/abs/2505.06708

    Args:
        hidden_size: Size of inputs and outputs.
        num_attention_heads: Hq.
        num_key_value_heads: Hk; divides Hq.
        head_dim: D.
        qk_norm_eps: Epsilon of the norms of each head's queries and keys; None for no norms.
        is_causal: Whether tokens see no later ones.
        rope_style: Which dimensions form a pair that is rotated together.
        rope_dim: How many dimensions, from the first, are rotated; by default all.
        enable_output_gate: Whether the heads' outputs are multiplied by the sigmoid of a further projection.
        qk_norm_zero_centered: As in `RMSNorm`.
        sdpa_backend: Implementation of attention; by default see `build_sdpa_backend`.
        window_size: How many tokens before and after its own a token sees; None for no limit. A "sliding window" of W
            tokens is ``(W - 1, None)`` here: it counts the token itself.
        enable_sinks: Whether each query head has a learned sink, see `AttentionSinks`.
        bias: Whether the projections of queries, keys and values have a bias.
        output_bias: Whether the output projection has a bias; by default as `bias`.

    Raises:
        ValueError: If heads can not be shared evenly, or more dimensions are to be rotated than there are.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        qk_norm_eps: float | None,
        is_causal: bool,
        rope_style: RotaryEmbeddingStyle,
        rope_dim: int | None = None,
        enable_output_gate: bool = False,
        qk_norm_zero_centered: bool = False,
        sdpa_backend: AnySdpaBackendConfig | None = None,
        *,
        window_size: tuple[int | None, int | None] = (None, None),
        enable_sinks: bool = False,
        bias: bool = False,
        output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        _check_heads(num_attention_heads, num_key_value_heads)
        self.head_dim = head_dim
        self._rope_dim = head_dim if rope_dim is None else rope_dim
        if not 0 < self._rope_dim <= head_dim or self._rope_dim % 2:
            raise ValueError(f"rope_dim ({rope_dim}) must be even and between 2 and head_dim ({head_dim}).")
        self._is_causal = is_causal
        self._scale = head_dim**-0.5
        query_size, key_size = num_attention_heads * head_dim, num_key_value_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, key_size, bias=bias)
        self.gate_proj = nn.Linear(hidden_size, query_size, bias=bias) if enable_output_gate else None
        self.o_proj = nn.Linear(query_size, hidden_size, bias=bias if output_bias is None else output_bias)
        has_norms = qk_norm_eps is not None
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, qk_norm_zero_centered) if has_norms else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, qk_norm_zero_centered) if has_norms else None
        self.rope = RotaryEmbeddingApplicator(rope_style)
        self.sdpa = build_sdpa_backend(
            SdpaParameters(num_sinks=num_attention_heads if enable_sinks else None, window_size=window_size),
            sdpa_backend,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Let tokens see each other.

        Shapes:
            Hidden states ``(B, T, hidden_size)``, as the result; mask as in `SdpaBackend`; cosines and sines
            ``(B, T, rope_dim)`` each.

        Args:
            hidden_states: Tokens.
            attention_mask: True where a token may be seen, or a floating point term for the logits; None for neither.
            position_embeddings: Cosines and sines, from a `RotaryEmbeddingProvider` of the same style.

        Raises:
            ValueError: If position embeddings are not of `rope_dim` dimensions.
        """
        cos, sin = position_embeddings
        if cos.shape[-1] != self._rope_dim:
            raise ValueError(
                f"position embeddings have {cos.shape[-1]} dimensions, the layer rotates {self._rope_dim}. "
                f"Build the RotaryEmbeddingProvider with head_dim={self._rope_dim}."
            )
        queries = self._heads(self.q_proj(hidden_states), self.q_norm)
        keys = self._heads(self.k_proj(hidden_states), self.k_norm)
        values = self._heads(self.v_proj(hidden_states), None)
        queries, keys = self.rope(queries, keys, cos, sin)
        attended = self.sdpa(queries, keys, values, attention_mask, self._is_causal, self._scale)  # (B, Hq, T, D)
        joined = attended.transpose(-3, -2).flatten(-2)  # (B, T, Hq * D)
        if self.gate_proj is not None:
            joined = joined * self.gate_proj(hidden_states).sigmoid()
        return self.o_proj(joined)

    def _heads(self, projected: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        heads = projected.unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        return (heads if norm is None else norm(heads)).transpose(-3, -2)  # (B, H, T, D)

    def reset_parameters(self) -> None:
        """Initialise projections as `nn.Linear` does, norms to one, sinks to zero."""
        for module in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.o_proj, self.q_norm, self.k_norm):
            if module is not None:
                module.reset_parameters()
        reset_sinks(self.sdpa)


def reset_sinks(sdpa: object) -> None:
    """Initialise what an implementation of attention has learned, if it learns."""
    if isinstance(sdpa, nn.Module):
        for module in sdpa.modules():
            if module is not sdpa and isinstance(module, ModuleLateInit):
                module.reset_parameters()


def _check_heads(num_attention_heads: int, num_key_value_heads: int) -> None:
    if num_attention_heads <= 0 or num_key_value_heads <= 0 or num_attention_heads % num_key_value_heads:
        valid = [count for count in range(1, num_attention_heads + 1) if num_attention_heads % count == 0]
        raise ValueError(
            f"num_attention_heads ({num_attention_heads}) must be a positive multiple of num_key_value_heads "
            f"({num_key_value_heads}). Valid numbers of key and value heads: {valid}."
        )
