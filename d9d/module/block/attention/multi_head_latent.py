"""Attention whose keys and values are made from one small vector per token.

Axes: B batch, T tokens, H heads, N dimensions of a head without position, R with position, V of values, L latent.
"""

import torch
from torch import nn

from d9d.module.base import ModuleLateInit
from d9d.module.block.normalization import RMSNorm
from d9d.module.block.positional import RotaryEmbeddingApplicator, RotaryEmbeddingStyle

from .grouped_query import reset_sinks
from .sdpa import AnySdpaBackendConfig, SdpaParameters, build_sdpa_backend


class LowRankProjection(nn.Module, ModuleLateInit):
    """Projects through a bottleneck with a norm in it: ``up(norm(down(x)))``.

    Shapes:
        ``(..., in_features)`` to ``(..., out_features)``.

    Args:
        in_features: Size of inputs.
        bottleneck: Size between.
        out_features: Size of outputs.
        norm_eps: Epsilon of the norm.
    """

    def __init__(self, in_features: int, bottleneck: int, out_features: int, norm_eps: float) -> None:
        super().__init__()
        self.down_proj = nn.Linear(in_features, bottleneck, bias=False)
        self.norm = RMSNorm(bottleneck, norm_eps)
        self.up_proj = nn.Linear(bottleneck, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project ``x``."""
        return self.up_proj(self.norm(self.down_proj(x)))

    def reset_parameters(self) -> None:
        """Initialise projections as `nn.Linear` does, and the norm to one."""
        self.down_proj.reset_parameters()
        self.norm.reset_parameters()
        self.up_proj.reset_parameters()


class MultiHeadLatentAttention(nn.Module, ModuleLateInit):
    """Multi-head latent attention, as in DeepSeek-V2 and -V3.

    Keys and values of all heads are projections of one latent vector per token. Positions are in further dimensions,
    whose keys all heads share.

    Source:
        https://arxiv.org/abs/2405.04434, section 2.1

    Args:
        hidden_size: Size of inputs and outputs.
        num_attention_heads: H.
        qk_nope_head_dim: N.
        qk_rope_head_dim: R.
        v_head_dim: V.
        kv_lora_rank: L, the size of the latent vector.
        q_lora_rank: Size of the bottleneck before the queries; None for a plain projection.
        qk_down_norm_eps: Epsilon of the norms of the latent vector and of the queries' bottleneck.
        is_causal: Whether tokens see no later ones.
        rope_style: Which dimensions form a pair that is rotated together.
        sdpa_backend: Implementation of attention; by default see `build_sdpa_backend`.
        softmax_scale: Factor on the products of queries and keys; by default ``(N + R) ** -0.5``. Models that were
            stretched with YaRN multiply it by the square of `yarn_mscale`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_lora_rank: int,
        q_lora_rank: int | None,
        qk_down_norm_eps: float,
        is_causal: bool,
        rope_style: RotaryEmbeddingStyle,
        sdpa_backend: AnySdpaBackendConfig | None = None,
        *,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_attention_heads
        self._nope_dim, self._rope_dim, self._value_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self._kv_lora_rank, self._q_lora_rank = kv_lora_rank, q_lora_rank
        self._is_causal = is_causal
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        self._scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        query_size = num_attention_heads * head_dim
        self.q_proj: nn.Linear | LowRankProjection = (
            nn.Linear(hidden_size, query_size, bias=False)
            if q_lora_rank is None
            else LowRankProjection(hidden_size, q_lora_rank, query_size, qk_down_norm_eps)
        )
        self.kv_down_proj = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(kv_lora_rank, qk_down_norm_eps)
        self.kv_up_proj = nn.Linear(kv_lora_rank, num_attention_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_attention_heads * v_head_dim, hidden_size, bias=False)
        self.rope = RotaryEmbeddingApplicator(rope_style)
        self.sdpa = build_sdpa_backend(SdpaParameters(num_sinks=None), sdpa_backend)

    @property
    def q_lora_rank(self) -> int | None:
        """Size of the bottleneck before the queries, None without one."""
        return self._q_lora_rank

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Let tokens see each other.

        Shapes:
            Hidden states ``(B, T, hidden_size)``, as the result; mask as in `SdpaBackend`; cosines and sines
            ``(B, T, R)`` each.

        Args:
            hidden_states: Tokens.
            attention_mask: True where a token may be seen, or a floating point term for the logits; None for neither.
            position_embeddings: Cosines and sines, from a `RotaryEmbeddingProvider` of the same style.

        Raises:
            ValueError: If position embeddings are not of `qk_rope_head_dim` dimensions.
        """
        cos, sin = position_embeddings
        if cos.shape[-1] != self._rope_dim:
            raise ValueError(
                f"position embeddings have {cos.shape[-1]} dimensions, the layer rotates {self._rope_dim}. "
                f"Build the RotaryEmbeddingProvider with head_dim={self._rope_dim}."
            )
        queries = self._heads(self.q_proj(hidden_states), self._nope_dim + self._rope_dim)  # (B, H, T, N + R)
        query_nope, query_rope = queries.split((self._nope_dim, self._rope_dim), dim=-1)
        latent, key_rope = self.kv_down_proj(hidden_states).split((self._kv_lora_rank, self._rope_dim), dim=-1)
        query_rope, key_rope = self.rope(query_rope, key_rope.unsqueeze(-3), cos, sin)  # (B, 1, T, R) for the keys
        expanded = self._heads(self.kv_up_proj(self.kv_norm(latent)), self._nope_dim + self._value_dim)
        key_nope, values = expanded.split((self._nope_dim, self._value_dim), dim=-1)  # (B, H, T, N), (B, H, T, V)
        keys = torch.cat((key_nope, key_rope.expand(*key_nope.shape[:-1], -1)), dim=-1)
        queries = torch.cat((query_nope, query_rope), dim=-1)
        attended = self.sdpa(queries, keys, values, attention_mask, self._is_causal, self._scale)  # (B, H, T, V)
        return self.o_proj(attended.transpose(-3, -2).flatten(-2))

    @staticmethod
    def _heads(projected: torch.Tensor, head_dim: int) -> torch.Tensor:
        # As many heads as there are: a tensor-parallel rank has some of them.
        return projected.unflatten(-1, (-1, head_dim)).transpose(-3, -2)

    def reset_parameters(self) -> None:
        """Initialise projections as `nn.Linear` does, and norms to one."""
        for module in (self.q_proj, self.kv_down_proj, self.kv_norm, self.kv_up_proj, self.o_proj):
            module.reset_parameters()
        reset_sinks(self.sdpa)
