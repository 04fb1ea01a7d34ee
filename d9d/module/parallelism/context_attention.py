"""Attention of a context-parallel rank's queries to the keys and values of all ranks, forward and backward.

Axes: B batch, Hq query heads, Hk key and value heads, T tokens of a rank, D dimensions of a head, Dv of its values.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from d9d.kernel.attention_tile import AttentionTile, attend, attend_backward
from d9d.kernel.precision import at_least_fp32
from d9d.module.block.attention.sdpa.parameters import combine_masks, visible_at
from d9d.module.parallelism.attention_plan import TileKind, TilePlan, plan_tiles
from d9d.module.parallelism.key_value_exchange import HeldKeys, KeysValues, KeyValueExchange
from d9d.module.parallelism.sequence_sharding import SequenceSharding

__all__ = ["ContextAttention", "context_attention"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """What a layer's calls have in common."""

    sharding: SequenceSharding
    """Which tokens this rank has."""
    exchange: KeyValueExchange
    """How keys and values come here."""
    window_size: tuple[int | None, int | None]
    """As in `SdpaParameters`."""
    allow_fused: bool
    """Whether fused kernels may be used."""
    is_causal: bool
    """Whether queries see no later keys."""
    scale: float
    """Factor on the products of queries and keys."""

    def tiles(
        self, queries: torch.Tensor, mask: torch.Tensor | None, held: HeldKeys
    ) -> Iterator[tuple["_Places", AttentionTile]]:
        """Yield what this rank computes of the keys at hand."""
        own_chunks = self.sharding.chunks_of(self.sharding.rank)
        size = queries.shape[-2] // len(own_chunks)
        plans = plan_tiles(own_chunks, held.chunks, size, is_causal=self.is_causal, window_size=self.window_size)
        for plan in plans:
            rows, columns = (slice(first * size, end * size) for first, end in (plan.queries, plan.keys))
            is_causal = plan.kind == TileKind.causal and mask is None
            tile = AttentionTile(
                queries=queries[..., rows, :],
                keys=held.states.keys[..., columns, :],
                values=held.states.values[..., columns, :],
                scale=self.scale,
                is_causal=is_causal,
                mask=None if is_causal else self._mask(plan, mask, held.chunks, size, queries.device),
            )
            yield _Places(rows, columns), tile

    def _mask(
        self, plan: TilePlan, mask: torch.Tensor | None, key_chunks: tuple[int, ...], size: int, device: torch.device
    ) -> torch.Tensor | None:
        """Return what the queries of a tile see of its keys, from positions and the mask of the call."""
        own_chunks = self.sharding.chunks_of(self.sharding.rank)
        keys = _positions(key_chunks[slice(*plan.keys)], size, device)
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else mask[..., plan.queries[0] * size : plan.queries[1] * size, :]
            mask = mask if mask.shape[-1] == 1 else mask.index_select(-1, keys)
        if plan.kind == TileKind.full:
            return mask
        queries = _positions(own_chunks[slice(*plan.queries)], size, device)
        visible = visible_at(queries, keys, self.is_causal, self.window_size)
        joined = combine_masks(visible, mask)
        return None if joined is None else joined.view((1,) * (4 - joined.ndim) + joined.shape)


class _Places(NamedTuple):
    """Where a tile lies in the tensors of queries, and of keys at hand."""

    rows: slice
    columns: slice


@torch.compiler.disable()  # traces end here: the compiler knows neither transfers nor the order they have to keep
def context_attention(
    call: ContextAttention,
    queries: torch.Tensor,
    own: KeysValues,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the attention of this rank's queries. All ranks must call it, and its backward pass.

    Shapes:
        Queries ``(B, Hq, T, D)``; result ``(B, Hq, T, Dv)``.

    Args:
        call: Properties of the layer.
        queries: Of this rank's tokens.
        own: Keys and values of this rank's tokens.
        sinks: ``(Hq,)``, as in `AttentionSinks`; None without.
        mask: Four axes that broadcast to this rank's queries and the keys of whole sequences, in sequence order.
    """
    # Autograd functions are untyped.
    return cast("torch.Tensor", _ContextAttention.apply(call, queries, own.keys, own.values, sinks, mask))


class _ContextAttention(torch.autograd.Function):
    """Saves what this rank has, and neither keys of other ranks nor attention weights."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # takes what is put on it
        call: ContextAttention,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        joined = _JoinedAttention(queries, values)
        for held in call.exchange.rounds(KeysValues(keys, values)):
            for places, tile in call.tiles(queries, mask, held):
                joined.add(places.rows, *attend(tile, allow_fused=call.allow_fused))
        if sinks is not None:
            joined.add_sinks(sinks)
        output = joined.output.to(values.dtype)
        ctx.call = call
        ctx.save_for_backward(queries, keys, values, sinks, mask, output, joined.logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        call: ContextAttention = ctx.call
        queries, keys, values, sinks, mask, output, logsumexp = ctx.saved_tensors
        grad_queries = torch.zeros_like(at_least_fp32(queries))

        def gradients_of(held: HeldKeys) -> KeysValues:
            gradients = KeysValues(*(torch.zeros_like(at_least_fp32(states)) for states in held.states))
            for (rows, columns), tile in call.tiles(queries, mask, held):
                of_rows = (whole[:, :, rows] for whole in (output, logsumexp, grad_output))
                of_tile = attend_backward(tile, *of_rows, allow_fused=call.allow_fused)
                grad_queries[..., rows, :] += of_tile[0]
                gradients.keys[..., columns, :] += of_tile[1]
                gradients.values[..., columns, :] += of_tile[2]
            return gradients

        gradients = call.exchange.collect(KeysValues(keys, values), gradients_of)
        grad_sinks = None
        if sinks is not None:
            # A sink has a weight in the softmax like a key's, and a value of zero.
            common = (at_least_fp32(output) * grad_output).sum(-1)  # (B, Hq, T)
            weights = (sinks.to(logsumexp.dtype).view(-1, 1) - logsumexp).exp()
            grad_sinks = -(weights * common).sum((0, 2)).to(sinks.dtype)
        return (
            None,
            grad_queries.to(queries.dtype),
            gradients.keys.to(keys.dtype),
            gradients.values.to(values.dtype),
            grad_sinks,
            None,
        )


class _JoinedAttention:
    """Attention over the keys seen so far. See [Note: joining attention to parts of the keys]."""

    def __init__(self, queries: torch.Tensor, values: torch.Tensor) -> None:
        wide = at_least_fp32(values)
        self.output = wide.new_zeros((*queries.shape[:-1], values.shape[-1]))
        self.logsumexp = wide.new_full(queries.shape[:-1], -torch.inf)

    def add(self, rows: slice, output: torch.Tensor, logsumexp: torch.Tensor) -> None:
        """Join the attention of some queries to further keys."""
        before = self.logsumexp[..., rows]
        joined = torch.logaddexp(before, logsumexp)
        # Where nothing has been seen yet, infinities would cancel to NaN.
        base = joined.masked_fill(joined == -torch.inf, 0.0)
        kept = self.output[..., rows, :] * (before - base).exp().unsqueeze(-1)
        self.output[..., rows, :] = kept + output * (logsumexp - base).exp().unsqueeze(-1)
        self.logsumexp[..., rows] = joined

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Join one more key per head, with this logit and no value."""
        joined = torch.logaddexp(self.logsumexp, sinks.to(self.logsumexp.dtype).view(-1, 1))
        self.output *= (self.logsumexp - joined).exp().unsqueeze(-1)
        self.logsumexp = joined


def _positions(chunks: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(number * size, (number + 1) * size, device=device) for number in chunks])
