"""Attention from plain tensor operations. Axes as in `parameters`."""

import torch
from torch import nn

from d9d.kernel.precision import at_least_fp32

from .parameters import AttentionSinks, SdpaParameters, combine_masks, num_groups, visibility


class EagerSdpaBackend(nn.Module):
    """Computes attention weights as a whole, and their softmax in fp32 at least.

    Args:
        params: Properties of the layer.
    """

    context_parallel_degree: int = 1
    """See `MixesTokens`: a rank has to have whole sequences."""

    def __init__(self, params: SdpaParameters) -> None:
        super().__init__()
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
        groups = num_groups(query_states, key_states)
        keys = key_states.repeat_interleave(groups, dim=-3)
        values = value_states.repeat_interleave(groups, dim=-3)
        logits = query_states @ keys.mT * scale  # (B, Hq, Tq, Tk)
        logits = at_least_fp32(logits)
        num_queries, num_keys = logits.shape[-2:]
        visible = visibility(num_queries, num_keys, is_causal, self.window_size, logits.device)
        logits = _masked(logits, combine_masks(visible, attention_mask))
        if self.sinks is None:
            weights = _softmax(logits)
        else:
            sinks = self.sinks(logits.shape[-3]).to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
        return weights.to(values.dtype) @ values


def _masked(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax that is zero for queries that see no key, with zero gradients, where torch's is not a number."""
    sees_nothing = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)
