"""Which tiles of attention a context-parallel rank computes, from the places of chunks in the sequence.

Plain values only: a plan is made on the host, without looking at any tensor.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum

__all__ = ["TileKind", "TilePlan", "plan_tiles"]


class TileKind(StrEnum):
    """Which keys of a tile its queries see."""

    full = "full"
    """All."""
    causal = "causal"
    """Query i of the tile sees keys up to i."""
    partial = "partial"
    """Those that positions allow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Some of a rank's query chunks against some of the key chunks at hand; by place in the tensors, not in the sequence."""

    queries: tuple[int, int]
    """First chunk, and the one after the last."""
    keys: tuple[int, int]
    """First chunk, and the one after the last."""
    kind: TileKind
    """Which keys queries see."""


def plan_tiles(
    query_chunks: Sequence[int],
    key_chunks: Sequence[int],
    chunk_size: int,
    *,
    is_causal: bool,
    window_size: tuple[int | None, int | None] = (None, None),
) -> list[TilePlan]:
    """Return the tiles to compute; pairs of chunks that see nothing of each other are left out.

    Args:
        query_chunks: Numbers in the sequence of the chunks that a rank has, ascending, as they lie in its tensors.
        key_chunks: Numbers of the chunks of the keys at hand, ascending.
        chunk_size: Tokens of a chunk.
        is_causal: Whether queries see no later keys.
        window_size: How many tokens before and after its own a query sees; None for no limit.
    """
    before, after = window_size
    after = 0 if is_causal else after
    if after == 0 and before is None and tuple(query_chunks) == tuple(key_chunks):
        # Chunks ascend, so what is causal in each place is causal in the sequence.
        return [TilePlan(queries=(0, len(query_chunks)), keys=(0, len(key_chunks)), kind=TileKind.causal)]
    tiles: list[TilePlan] = []
    for place, query_chunk in enumerate(query_chunks):
        kinds = [_kind(key_chunk - query_chunk, chunk_size, before, after) for key_chunk in key_chunks]
        tiles.extend(TilePlan(queries=(place, place + 1), keys=keys, kind=kind) for kind, keys in _runs(kinds))
    return _joined(tiles)


def _kind(distance: int, chunk_size: int, before: int | None, after: int | None) -> TileKind | None:
    """Return what queries see of a chunk this many chunks behind their own; None for nothing."""
    nearest, farthest = distance * chunk_size - (chunk_size - 1), distance * chunk_size + (chunk_size - 1)
    if (before is not None and farthest < -before) or (after is not None and nearest > after):
        return None
    sees_back = before is None or nearest >= -before
    if sees_back and (after is None or farthest <= after):
        return TileKind.full
    return TileKind.causal if sees_back and after == 0 and distance == 0 else TileKind.partial


def _runs(kinds: Sequence[TileKind | None]) -> Iterator[tuple[TileKind, tuple[int, int]]]:
    """Join neighbours of one kind; a causal chunk has none."""
    start = 0
    for kind, run in itertools.groupby(kinds):
        end = start + len(list(run))
        if kind is not None:
            yield kind, (start, end)
        start = end


def _joined(tiles: Sequence[TilePlan]) -> list[TilePlan]:
    """Join tiles of neighbouring queries that see the same keys in full."""
    joined: list[TilePlan] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        is_alike = last is not None and tile.kind == last.kind == TileKind.full and tile.keys == last.keys
        if last is not None and is_alike and tile.queries[0] == last.queries[1]:
            joined[-1] = dataclasses.replace(last, queries=(last.queries[0], tile.queries[1]))
        else:
            joined.append(tile)
    return joined
