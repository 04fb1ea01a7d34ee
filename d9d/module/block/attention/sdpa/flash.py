"""Attention by the kernels of the packages flash-attn and flash-attn-4. Axes as in `parameters`.

Both put the last query at the position of the last key, and give zeros to queries that see no key, as `SdpaBackend` asks. They
compute in 16 bits and take no masks.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from d9d.kernel.optional import import_kernel

from .parameters import AttentionSinks, SdpaParameters, num_groups

_AnyKernel = Callable[..., Any]
"""A function of a package that has no types."""
_TRITON_VARIABLE: Final = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
"""Environment variable by which flash-attn takes kernels that are written in Triton."""


class FlashAttention2SdpaBackend(nn.Module):
    """Calls `flash_attn.flash_attn_func`.

    Args:
        params: Properties of the layer.

    Raises:
        ImportError: If the package is not installed.
        NotImplementedError: If the layer has sinks, or passes masks; or if it has a window, and the package is told to compute
            by Triton.
    """

    context_parallel_degree: int = 1
    """See `MixesTokens`: a rank has to have whole sequences."""

    def __init__(self, params: SdpaParameters) -> None:
        super().__init__()
        _refuse_masks("flash_attention_2", params.needs_attention_mask)
        if params.num_sinks is not None:
            raise NotImplementedError(
                "the attention kind flash_attention_2 has no sinks. Use flash_attention_4, or torch."
            )
        if params.window_size != (None, None) and os.environ.get(_TRITON_VARIABLE) == "TRUE":
            raise NotImplementedError(
                f"flash-attn computes by Triton ({_TRITON_VARIABLE}=TRUE), and leaves out the window {params.window_size} "
                "without a word then (2.8.3). Use the attention kind torch, or no window."
            )
        kernels = import_kernel("the attention kind flash_attention_2", "flash_attn", "flash-attn", "torch")
        self._kernel: _AnyKernel = kernels.flash_attn_func
        self.window_size = params.window_size

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
        _refuse_masks("flash_attention_2", attention_mask is not None)
        num_groups(query_states, key_states)
        value_dim = value_states.shape[-1]
        # The kernel wants one size; zeros change neither products nor sums.
        size = max(query_states.shape[-1], value_dim)
        padded = (_widened(states, size) for states in (query_states, key_states, value_states))
        window = tuple(-1 if size is None else size for size in self.window_size)
        output = self._kernel(
            *(states.transpose(-3, -2) for states in padded),  # (B, T, H, D)
            softmax_scale=scale,
            causal=is_causal,
            window_size=window,
        )
        return output.transpose(-3, -2)[..., :value_dim]


class FlashAttention4SdpaBackend(nn.Module):
    """Calls `flash_attn.cute.flash_attn_func`.

    Args:
        params: Properties of the layer.

    Raises:
        ImportError: If the package is not installed.
        NotImplementedError: If the layer passes masks.
    """

    context_parallel_degree: int = 1
    """See `MixesTokens`: a rank has to have whole sequences."""

    def __init__(self, params: SdpaParameters) -> None:
        super().__init__()
        _refuse_masks("flash_attention_4", params.needs_attention_mask)
        kernels = import_kernel("the attention kind flash_attention_4", "flash_attn.cute", "flash-attn-4", "torch")
        self._kernel: _AnyKernel = kernels.flash_attn_func
        self.window_size = params.window_size
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
        _refuse_masks("flash_attention_4", attention_mask is not None)
        num_groups(query_states, key_states)
        # In a dtype of their own, which may be finer than that of the states.
        sinks = None if self.sinks is None else self.sinks(query_states.shape[-3])
        output, _ = self._kernel(
            *(states.transpose(-3, -2) for states in (query_states, key_states, value_states)),  # (B, T, H, D)
            softmax_scale=scale,
            causal=is_causal,
            window_size=self.window_size,
            learnable_sink=sinks,
        )
        return output.transpose(-3, -2)


def _widened(states: torch.Tensor, size: int) -> torch.Tensor:
    # To pad by nothing would copy.
    return states if states.shape[-1] == size else F.pad(states, (0, size - states.shape[-1]))


def _refuse_masks(kind: str, has_mask: bool) -> None:
    if has_mask:
        raise NotImplementedError(
            f"the attention kind {kind} takes no masks but the causal one and windows. Use torch or eager."
        )
