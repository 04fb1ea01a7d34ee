"""Linear attention by the gated delta rule.

Axes: B batch, T tokens, Hk heads of queries and keys, Hv heads of values, K and V dimensions of their heads.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from d9d.kernel.precision import at_least_fp32
from d9d.module.base import ModuleLateInit
from d9d.module.block.normalization import RMSNorm

from .decay_gate import AnyDecayGateParameters, build_decay_gate
from .delta_rule import AnyDeltaRuleConfig, build_delta_rule

_L2_NORM_EPS: Final = 1e-6


class ShortConvolution(nn.Module, ModuleLateInit):
    """Mixes each channel over its last few tokens, then SiLU.

    Args:
        num_channels: Number of channels.
        size: How many tokens, the current one included.
    """

    def __init__(self, num_channels: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(num_channels, num_channels, size, groups=num_channels, padding=size - 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix: ``(B, T, channels)`` to the same."""
        num_tokens = x.shape[1]
        return F.silu(self.conv(x.mT)[..., :num_tokens]).mT

    def reset_parameters(self) -> None:
        """Initialise as `nn.Conv1d` does."""
        self.conv.reset_parameters()


class GatedDeltaNet(nn.Module, ModuleLateInit):
    """Gated delta net, as in Qwen3-Next: a state of fixed size per head stands in for all earlier tokens.

    Args:
        hidden_size: Size of inputs and outputs.
        num_query_key_heads: Hk.
        num_value_heads: Hv, a multiple of Hk; neighbouring ones share a head of queries and keys.
        head_qk_dim: K.
        head_v_dim: V.
        norm_eps: Epsilon of the norm of each head's outputs.
        conv_size: Tokens that the convolutions before queries, keys and values see.
        decay_gate: How the state forgets.
        use_qk_l2norm: Whether queries and keys are scaled to length one.
        delta_rule: Implementation of the rule; by default plain operations in chunks.

    Raises:
        ValueError: If heads can not be shared evenly.
    """

    context_parallel_degree: int = 1
    """See `MixesTokens`: a rank has to have whole sequences."""

    def __init__(
        self,
        hidden_size: int,
        num_query_key_heads: int,
        num_value_heads: int,
        head_qk_dim: int,
        head_v_dim: int,
        norm_eps: float,
        conv_size: int,
        decay_gate: AnyDecayGateParameters,
        use_qk_l2norm: bool = True,
        *,
        delta_rule: AnyDeltaRuleConfig | None = None,
    ) -> None:
        super().__init__()
        if num_query_key_heads <= 0 or num_value_heads <= 0 or num_value_heads % num_query_key_heads:
            raise ValueError(
                f"num_value_heads ({num_value_heads}) must be a positive multiple of num_query_key_heads "
                f"({num_query_key_heads}): value heads share the others evenly."
            )
        self._groups = num_value_heads // num_query_key_heads
        self._key_dim, self._value_dim = head_qk_dim, head_v_dim
        self._has_l2_norm = use_qk_l2norm
        self._delta_rule = build_delta_rule(delta_rule)
        keys_size, values_size = num_query_key_heads * head_qk_dim, num_value_heads * head_v_dim
        self.q_proj = nn.Linear(hidden_size, keys_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, values_size, bias=False)
        self.q_conv = ShortConvolution(keys_size, conv_size)
        self.k_conv = ShortConvolution(keys_size, conv_size)
        self.v_conv = ShortConvolution(values_size, conv_size)
        self.strength_proj = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.decay_gate = build_decay_gate(hidden_size, num_value_heads, decay_gate)
        self.gate_proj = nn.Linear(hidden_size, values_size, bias=False)
        self.norm = RMSNorm(head_v_dim, norm_eps)
        self.o_proj = nn.Linear(values_size, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Let tokens read what earlier ones wrote.

        Shapes:
            ``(B, T, hidden_size)`` to the same.

        Args:
            hidden_states: Tokens.
            attention_mask: ``(B, T)``, zero for padding, whose vectors are set to zero before anything else; None for
                no padding. Padding in front of a sequence does not change it; packed sequences are not kept apart.

        Raises:
            ValueError: If the mask has another shape than the tokens.
        """
        if attention_mask is not None:
            if attention_mask.shape != hidden_states.shape[:2]:
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, but hidden states are of "
                    f"{tuple(hidden_states.shape[:2])} tokens. Linear attention takes one value per token."
                )
            hidden_states = hidden_states.masked_fill((attention_mask == 0).unsqueeze(-1), 0.0)
        q = self._unit_length(_heads(self.q_conv(self.q_proj(hidden_states)), self._key_dim))  # (B, Hk, T, K)
        k = self._unit_length(_heads(self.k_conv(self.k_proj(hidden_states)), self._key_dim))
        v = _heads(self.v_conv(self.v_proj(hidden_states)), self._value_dim)  # (B, Hv, T, V)
        outputs = self._delta_rule(
            q.repeat_interleave(self._groups, dim=1) * self._key_dim**-0.5,
            k.repeat_interleave(self._groups, dim=1),
            v,
            self.decay_gate(hidden_states).mT,  # (B, Hv, T)
            self.strength_proj(hidden_states).sigmoid().mT,
        )
        normalized = self.norm(outputs.transpose(1, 2)).flatten(-2)  # (B, T, Hv * V)
        gates = F.silu(at_least_fp32(self.gate_proj(hidden_states)))
        return self.o_proj((normalized * gates).to(normalized.dtype))

    def _unit_length(self, states: torch.Tensor) -> torch.Tensor:
        wide = at_least_fp32(states)
        if not self._has_l2_norm:
            return wide
        return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _L2_NORM_EPS)

    def reset_parameters(self) -> None:
        """Initialise projections and convolutions as torch does, the norm to one, and the decay gate as it says."""
        for module in self.children():
            if isinstance(module, ModuleLateInit):
                module.reset_parameters()


def _heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, H, T, D)
