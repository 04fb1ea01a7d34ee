"""Which tiles are computed: counted by hand, and against the pairs of tokens that see each other."""

import itertools

import pytest

from d9d.module.parallelism.attention_plan import TileKind, TilePlan, plan_tiles
from d9d.module.parallelism.sequence_sharding import SequenceOrder, SequenceSharding


def tile(queries: tuple[int, int], keys: tuple[int, int], kind: str) -> TilePlan:
    return TilePlan(queries=queries, keys=keys, kind=TileKind(kind))


def test_a_causal_ring_in_zigzag_order():
    """Of two ranks, the first has chunks 0 and 3, the second 1 and 2; both compute the same amount in each round."""
    whole = tile((0, 2), (0, 2), "causal")
    assert plan_tiles((0, 3), (0, 3), 4, is_causal=True) == [whole]
    assert plan_tiles((1, 2), (1, 2), 4, is_causal=True) == [whole]
    assert plan_tiles((0, 3), (1, 2), 4, is_causal=True) == [tile((1, 2), (0, 2), "full")]
    assert plan_tiles((1, 2), (0, 3), 4, is_causal=True) == [tile((0, 2), (0, 1), "full")]


def test_gathered_keys():
    assert plan_tiles((1, 2), (0, 1, 2, 3), 4, is_causal=True) == [
        tile((0, 1), (0, 1), "full"),
        tile((0, 1), (1, 2), "causal"),
        tile((1, 2), (0, 2), "full"),
        tile((1, 2), (2, 3), "causal"),
    ]
    assert plan_tiles((1, 2), (0, 1, 2, 3), 4, is_causal=False) == [tile((0, 2), (0, 4), "full")]


def test_windows():
    """Chunks of four tokens; query 8 of chunk 2 sees back to token 5, query 11 to token 8."""
    assert plan_tiles((2,), (0, 1, 2, 3), 4, is_causal=True, window_size=(3, None)) == [
        tile((0, 1), (1, 2), "partial"),
        tile((0, 1), (2, 3), "causal"),
    ]
    assert plan_tiles((2,), (0, 1), 4, is_causal=True, window_size=(0, None)) == []
    assert plan_tiles((2,), (2,), 4, is_causal=True, window_size=(2, None)) == [tile((0, 1), (0, 1), "partial")]


WINDOWS = [(None, None), (0, None), (2, None), (3, None), (4, None), (9, None), (None, 1), (2, 1), (3, 4)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_cover_what_is_seen_once(window: tuple[int | None, int | None], is_causal: bool):
    size, num_chunks = 3, 6
    before, after = window[0], 0 if is_causal else window[1]

    def is_seen(query: int, key: int) -> bool:
        return (before is None or key >= query - before) and (after is None or key <= query + after)

    def tokens(chunks: tuple[int, ...], places: tuple[int, int]) -> list[int]:
        return [number * size + token for number in chunks[slice(*places)] for token in range(size)]

    for own, held in itertools.product([(0, 5), (1, 4), (2, 3)], [(0, 5), (1, 4), (2, 3), tuple(range(num_chunks))]):
        covered: list[tuple[int, int]] = []
        for plan in plan_tiles(own, held, size, is_causal=is_causal, window_size=window):
            queries, keys = tokens(own, plan.queries), tokens(held, plan.keys)
            pairs = [(query, key) for query in queries for key in keys]
            if plan.kind == TileKind.full:
                assert all(is_seen(*pair) for pair in pairs)
            elif plan.kind == TileKind.causal:
                by_place = [(query, key) for i, query in enumerate(queries) for key in keys[: i + 1]]
                assert by_place == [pair for pair in pairs if is_seen(*pair)]
            covered += [pair for pair in pairs if is_seen(*pair)]
        whole = (0, len(own)), (0, len(held))
        expected = [(q, k) for q in tokens(own, whole[0]) for k in tokens(held, whole[1]) if is_seen(q, k)]
        assert sorted(covered) == sorted(expected)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_zigzag_work_is_equal(num_ranks: int):
    """Pairs of chunks that a rank computes, a causal one as a half: by hand, half of all chunks squared over the ranks."""
    size = 2

    def work(rank: int, order: SequenceOrder) -> float:
        sharding = SequenceSharding(num_ranks=num_ranks, rank=rank, order=order)
        plans = plan_tiles(sharding.chunks_of(rank), range(sharding.num_chunks), size, is_causal=True)
        areas = [(p.queries[1] - p.queries[0]) * (p.keys[1] - p.keys[0]) for p in plans]
        return sum(area / 2 if p.kind == TileKind.causal else area for p, area in zip(plans, areas, strict=True))

    assert [work(rank, SequenceOrder.zigzag) for rank in range(num_ranks)] == [
        (2 * num_ranks) ** 2 / 2 / num_ranks
    ] * num_ranks
    assert [work(rank, SequenceOrder.contiguous) for rank in range(num_ranks)] == [
        rank + 0.5 for rank in range(num_ranks)
    ]
