"""Attention of some queries to some of their keys, with what it takes to join it with their attention to the others.

Axes: B batch, Hq query heads, Hk key and value heads, Tq and Tk tokens, D dimensions of a head, Dv of its values.

[Note: joining attention to parts of the keys]
The softmax over all keys is a weighted mean of the softmaxes over parts of them. Its weights follow from the logarithms
of the parts' sums of exponentials, so a part gives these too (its *logsumexp*). The backward pass of a part needs nothing
of the others but the output and the logsumexp over all keys: with them it computes the final attention weights.

Source: "FlashAttention", https://arxiv.org/abs/2205.14135, appendix B; "Ring Attention", https://arxiv.org/abs/2310.01889
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

_MAX_LOGITS: Final = 2**28
"""Logits that the plain path holds at once: 1 GiB in fp32. Above, it takes some queries after the other."""
_DIM_MULTIPLE: Final = 8
"""Fused kernels want heads of a multiple of this many dimensions."""
_MAX_FUSED_DIM: Final = 256
_HALF_DTYPES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """Some queries and some keys of a layer.

    Head h of the queries uses key head ``h // (Hq // Hk)``.
    """

    queries: torch.Tensor
    """``(B, Hq, Tq, D)``."""
    keys: torch.Tensor
    """``(B, Hk, Tk, D)``."""
    values: torch.Tensor
    """``(B, Hk, Tk, Dv)``."""
    scale: float
    """Factor on the products of queries and keys."""
    is_causal: bool = False
    """Whether query i sees keys up to i only; then Tq is Tk, and there is no mask."""
    mask: torch.Tensor | None = None
    """True where a key may be seen, or a floating point term for the logits; four axes that broadcast."""

    def rows(self, start: int, end: int) -> "AttentionTile":
        """Return the tile of some of the queries, with a mask in place of causality."""
        mask = self.mask
        if self.is_causal:
            num_keys = self.keys.shape[-2]
            mask = torch.ones(end - start, num_keys, dtype=torch.bool, device=self.keys.device).tril(start)
            mask = mask.view(1, 1, end - start, num_keys)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask[..., start:end, :]
        return AttentionTile(
            queries=self.queries[..., start:end, :], keys=self.keys, values=self.values, scale=self.scale, mask=mask
        )


def attend(tile: AttentionTile, *, allow_fused: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of a tile; records no graph.

    Queries that see no key get zeros, and a logsumexp of minus infinity.

    Shapes:
        Output ``(B, Hq, Tq, Dv)`` in the dtype of the values, logsumexp ``(B, Hq, Tq)`` in fp32 at least.

    Args:
        tile: Queries and keys.
        allow_fused: Whether to call a fused kernel where there is one, see `has_fused_kernel`.
    """
    if allow_fused and has_fused_kernel(tile):
        return _fused(tile)
    parts = [_plain(tile.rows(start, end)) for start, end in _row_ranges(tile)]
    return torch.cat([output for output, _ in parts], -2), torch.cat([logsumexp for _, logsumexp in parts], -1)


def attend_backward(
    tile: AttentionTile,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_output: torch.Tensor,
    *,
    allow_fused: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what a tile adds to the gradients of its queries, keys and values.

    See [Note: joining attention to parts of the keys].

    Args:
        tile: Queries and keys.
        output: Of these queries over all their keys, not only those of the tile.
        logsumexp: Of these queries over all their keys.
        grad_output: Gradient of the output.
        allow_fused: As in `attend`.
    """
    if allow_fused and has_fused_kernel(tile):
        return _fused_backward(tile, output, logsumexp, grad_output)
    grad_queries: list[torch.Tensor] = []
    grad_keys, grad_values = torch.zeros_like(tile.keys), torch.zeros_like(tile.values)
    for start, end in _row_ranges(tile):
        of_rows = (whole[:, :, start:end] for whole in (output, logsumexp, grad_output))
        of_queries, of_keys, of_values = _plain_backward(tile.rows(start, end), *of_rows)
        grad_queries.append(of_queries)
        grad_keys += of_keys
        grad_values += of_values
    return torch.cat(grad_queries, -2), grad_keys, grad_values


def has_fused_kernel(tile: AttentionTile) -> bool:
    """Tell whether a fused kernel can compute a tile: without a mask, on CPU, or on CUDA devices in 16 bits."""
    dtypes = {tile.queries.dtype, tile.keys.dtype, tile.values.dtype}
    if tile.mask is not None or len(dtypes) > 1 or tile.values.shape[-1] > tile.keys.shape[-1]:
        return False
    match tile.queries.device.type:
        case "cpu":
            return True
        case "cuda":
            is_narrow = tile.queries.shape[-1] <= _MAX_FUSED_DIM
            # FlashAttention's kernels begin with this generation.
            has_kernel = torch.version.hip is None and torch.cuda.get_device_capability(tile.queries.device) >= (8, 0)
            return is_narrow and has_kernel and tile.queries.dtype in _HALF_DTYPES
        case _:
            return False


def _row_ranges(tile: AttentionTile) -> Iterator[tuple[int, int]]:
    batch, num_heads, num_queries, _ = tile.queries.shape
    step = max(1, _MAX_LOGITS // max(1, batch * num_heads * tile.keys.shape[-2]))
    bounds = [*range(0, num_queries, step), num_queries]
    return itertools.pairwise(bounds)


def _logits(tile: AttentionTile) -> torch.Tensor:
    """Return masked logits in fp32 at least, by key head: ``(B, Hk, Hq / Hk, Tq, Tk)``."""
    num_key_heads = tile.keys.shape[1]
    logits = tile.queries.unflatten(1, (num_key_heads, -1)) @ tile.keys.unsqueeze(2).mT * tile.scale
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if tile.mask is None:
        return logits
    is_per_head = tile.mask.shape[1] > 1
    mask = tile.mask.unflatten(1, (num_key_heads, -1)) if is_per_head else tile.mask.unsqueeze(2)
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def _weights(logits: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Return attention weights; zeros for queries that see nothing, where infinities would cancel to NaN."""
    return (logits - logsumexp.masked_fill(logsumexp == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _plain(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    logits = _logits(tile)
    logsumexp = logits.logsumexp(-1)  # (B, Hk, Hq / Hk, Tq)
    output = _weights(logits, logsumexp).to(tile.values.dtype) @ tile.values.unsqueeze(2)
    return output.flatten(1, 2), logsumexp.flatten(1, 2)


def _plain_backward(
    tile: AttentionTile, output: torch.Tensor, logsumexp: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_key_heads = tile.keys.shape[1]
    output, logsumexp, grad_output, queries = (
        whole.unflatten(1, (num_key_heads, -1)) for whole in (output, logsumexp, grad_output, tile.queries)
    )
    keys, values = tile.keys.unsqueeze(2), tile.values.unsqueeze(2)  # (B, Hk, 1, Tk, D)
    weights = _weights(_logits(tile), logsumexp)
    grad_values = (weights.to(values.dtype).mT @ grad_output).sum(2)
    # How much the output as a whole moves along its gradient: what the softmax takes off each logit's gradient.
    common = (output.to(weights.dtype) * grad_output).sum(-1, keepdim=True)
    grad_logits = (weights * ((grad_output @ values.mT) - common) * tile.scale).to(keys.dtype)
    return (grad_logits @ keys).flatten(1, 2), (grad_logits.mT @ queries).sum(2), grad_values


def _fused(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys, values = _padded(tile)
    value_dim = tile.values.shape[-1]
    if queries.device.type == "cpu":
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, tile.is_causal, scale=tile.scale
        )
    else:
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, tile.is_causal, False, scale=tile.scale
        )
    return output[..., :value_dim], logsumexp


def _fused_backward(
    tile: AttentionTile, output: torch.Tensor, logsumexp: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    queries, keys, values = _padded(tile)
    padding = (0, values.shape[-1] - tile.values.shape[-1])
    output, grad_output = F.pad(output, padding).contiguous(), F.pad(grad_output, padding).contiguous()
    logsumexp = logsumexp.contiguous()
    if queries.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, queries, keys, values, output, logsumexp, 0.0, tile.is_causal, scale=tile.scale
        )
    else:
        # Without dropout the state of the random generator is not read, nor are the bounds of packed sequences.
        unread = queries.new_empty(0, dtype=torch.int64)
        sizes = (queries.shape[-2], keys.shape[-2])
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad_output, queries, keys, values, output, logsumexp, None, None, *sizes, 0.0, tile.is_causal),
            *(unread, unread),
            scale=tile.scale,
        )
    dims = (tile.queries.shape[-1], tile.keys.shape[-1], tile.values.shape[-1])
    grad_queries, grad_keys, grad_values = (grad[..., :dim] for grad, dim in zip(grads, dims, strict=True))
    return grad_queries, grad_keys, grad_values


def _padded(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring heads to one size that kernels take, with zeros, which change neither products nor sums."""
    head_dim = tile.keys.shape[-1]
    size = head_dim + -head_dim % _DIM_MULTIPLE
    queries, keys, values = (
        F.pad(whole, (0, size - whole.shape[-1])) for whole in (tile.queries, tile.keys, tile.values)
    )
    return queries, keys, values
