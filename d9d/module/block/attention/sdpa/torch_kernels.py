"""Attention by the kernels of torch. Axes as in `parameters`.

[Note: Sinks without a kernel]

The kernels know no sinks, but a sink is a key of its own with a zero value. All queries of a head must have the same
logit with it: heads get further dimensions, in which queries are one, keys are zero, and the sink's key is the sink's
logit (over the scale). That logit stands in two dimensions, as a rounded value and what rounding left, so that 16-bit
states do not cut it short. The sink's key stands last, and a mask lets all queries see it. Values are filled up with zeros.
"""

import contextlib
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import TorchSdpaBackendType
from .parameters import AttentionSinks, SdpaParameters, combine_masks, num_groups, visibility

_KERNELS = {
    TorchSdpaBackendType.MATH: SDPBackend.MATH,
    TorchSdpaBackendType.FLASH_ATTENTION: SDPBackend.FLASH_ATTENTION,
    TorchSdpaBackendType.EFFICIENT_ATTENTION: SDPBackend.EFFICIENT_ATTENTION,
    TorchSdpaBackendType.CUDNN_ATTENTION: SDPBackend.CUDNN_ATTENTION,
}
_DIM_MULTIPLE = 8
"""Kernels want heads of a multiple of this many dimensions."""
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_ALL_SHARE_HEADS: Final = torch.version.hip is None and torch.__version__ >= "2.14"
"""Whether, on CUDA, efficient and cuDNN attention take fewer key heads than query heads too, and not flash attention alone. From
the documentation of `scaled_dot_product_attention`: torch 2.13 names flash attention, 2.14 all three, for NVIDIA."""


class TorchSdpaBackend(nn.Module):
    """Calls `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        params: Properties of the layer.
        kernels: What torch may choose from; None for all.
    """

    context_parallel_degree: int = 1
    """See `MixesTokens`: a rank has to have whole sequences."""

    def __init__(self, params: SdpaParameters, kernels: Sequence[TorchSdpaBackendType] | None) -> None:
        super().__init__()
        self.window_size = params.window_size
        self.may_use_flash = kernels is None or TorchSdpaBackendType.FLASH_ATTENTION in kernels
        others = {TorchSdpaBackendType.EFFICIENT_ATTENTION, TorchSdpaBackendType.CUDNN_ATTENTION}
        self._may_use_others = kernels is None or not others.isdisjoint(kernels)
        self._kernels = None if kernels is None else [_KERNELS[kernel] for kernel in kernels]
        self.sinks = None if params.num_sinks is None else AttentionSinks(params.num_sinks)

    def forward(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Compute attention; arguments, shapes and errors as in `SdpaBackend`."""
        groups, value_dim = num_groups(query_states, key_states), value_states.shape[-1]
        num_queries, num_keys = query_states.shape[-2], key_states.shape[-2]
        # Torch's own causal mask needs no memory, and lets fast kernels run.
        is_plain_causal = (
            is_causal
            and num_queries == num_keys
            and attention_mask is None
            and self.sinks is None
            and self.window_size[0] is None
        )
        mask = None
        if not is_plain_causal:
            visible = visibility(num_queries, num_keys, is_causal, self.window_size, query_states.device)
            mask = combine_masks(visible, attention_mask)
        if self.sinks is not None:
            sinks = self.sinks(query_states.shape[-3])
            query_states, key_states, value_states = _with_sinks(query_states, key_states, value_states, sinks / scale)
            mask = None if mask is None else F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
            groups = 1
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query_states.dtype)
        if groups > 1 and not self._can_share_heads(query_states, value_states, mask):
            key_states, value_states = (each.repeat_interleave(groups, dim=-3) for each in (key_states, value_states))
            groups = 1
        with contextlib.nullcontext() if self._kernels is None else sdpa_kernel(self._kernels):
            output = F.scaled_dot_product_attention(
                query_states,
                key_states,
                value_states,
                attn_mask=mask,
                is_causal=is_plain_causal,
                scale=scale,
                enable_gqa=groups > 1,
            )
        return output[..., :value_dim]

    def _can_share_heads(
        self, query_states: torch.Tensor, value_states: torch.Tensor, mask: torch.Tensor | None
    ) -> bool:
        """Tell whether a fused kernel takes fewer key heads than query heads: on accelerators often flash attention alone.

        Where none does, torch would hold all attention weights, and copy key heads all the same.
        """
        if query_states.device.type == "cpu":
            return True
        if _ALL_SHARE_HEADS and query_states.is_cuda and self._may_use_others:
            return True
        takes_states = query_states.dtype in _HALF_DTYPES and query_states.shape[-1] == value_states.shape[-1]
        return self.may_use_flash and mask is None and takes_states


def _with_sinks(
    query_states: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key for the sinks, see [Note: Sinks without a kernel]; ``sinks`` is ``(Hq,)``."""
    groups = num_groups(query_states, key_states)
    batch, num_heads, num_queries, head_dim = query_states.shape
    rounded = sinks.to(query_states.dtype)
    # A constant, so that the sinks get their gradient once.
    rest = (sinks - rounded).detach().to(query_states.dtype)
    num_added = 2 + -(head_dim + 2) % _DIM_MULTIPLE
    ones = query_states.new_ones(batch, num_heads, num_queries, 2)
    queries = F.pad(torch.cat((query_states, ones), -1), (0, num_added - 2))
    sink_key = F.pad(torch.stack((rounded, rest), -1), (head_dim, num_added - 2))  # (Hq, D + added)
    sink_keys = sink_key.view(1, num_heads, 1, -1).expand(batch, -1, -1, -1)
    keys = F.pad(key_states.repeat_interleave(groups, dim=-3), (0, num_added))
    # Some kernels want values as wide as keys.
    num_added_to_values = max(0, queries.shape[-1] - value_states.shape[-1])
    values = F.pad(value_states.repeat_interleave(groups, dim=-3), (0, num_added_to_values, 0, 1))
    return queries, torch.cat((keys, sink_keys), -2), values
