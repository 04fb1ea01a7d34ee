"""The permutation of an epoch: that it is one, that it stays the same, and that it looks random."""

import hashlib
import time
import tracemalloc

import numpy as np
import pytest

from d9d.dataset.lanes import ORDER_VERSION, Permutation
from d9d.dataset.lanes.permutation import mix64

GAMMA = 0x9E3779B97F4A7C15

# 0.999 quantile of the chi-square distribution with 63 degrees of freedom.
CHI_SQUARE_63 = 103.4

GOLDEN_10 = [9, 2, 3, 1, 5, 8, 4, 7, 6, 0]
GOLDEN_1E9 = [110194725, 642022511, 791329364]


def reference(n: int, seed: int, epoch: int, index: int) -> int:
    """The permutation as its docstring says it, one bit string at a time."""
    digest = hashlib.blake2b(f"{ORDER_VERSION}/{seed}/{epoch}".encode(), digest_size=64).digest()
    keys = [sum(digest[8 * r + i] << (8 * i) for i in range(8)) for r in range(8)]
    width = max(1, len(bin(n - 1)) - 2)
    num_high = width // 2
    while True:
        text = format(index, f"0{width}b")
        halves = [int(text[:num_high] or "0", 2), int(text[num_high:], 2)]
        sizes = [num_high, width - num_high]
        for number, key in enumerate(keys):
            target = number % 2
            halves[target] ^= mix64(halves[1 - target] + key) % 2 ** sizes[target]
        index = halves[0] * 2 ** sizes[1] + halves[1]
        if index < n:
            return index


def test_the_hash_is_that_of_splitmix64():
    # The first three numbers of the generator with seed 0, as its author publishes them.
    assert [mix64(i * GAMMA) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_every_small_size_is_a_bijection():
    for n in range(1, 400):
        permutation = Permutation(n, seed=n, epoch=1)
        assert sorted(permutation[i] for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [1009, 65521, 99991, *(2**k + d for k in (10, 16) for d in (-1, 0, 1))])
def test_larger_sizes_are_bijections(n):
    taken = Permutation(n, seed=5, epoch=3).take(np.arange(n))
    assert np.array_equal(np.bincount(taken, minlength=n), np.ones(n))


@pytest.mark.parametrize("n", [10**9, 2**40 + 1, 2**62])
def test_a_sample_of_a_huge_permutation_has_no_collisions(n):
    indices = np.unique(np.random.default_rng(0).integers(0, n, 100_000))
    taken = Permutation(n, seed=1, epoch=0).take(indices)
    assert len(np.unique(taken)) == len(indices)
    assert 0 <= taken.min() <= taken.max() < n


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 100, 1000, 12345, 10**9])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3)])
def test_one_at_a_time_or_many_at_once_is_what_the_description_says(n, seed, epoch):
    permutation = Permutation(n, seed, epoch)
    indices = [0, 1, 2, n // 2, n - 1] if n > 2 else list(range(n))
    expected = [reference(n, seed, epoch, i) for i in indices]
    assert [permutation[i] for i in indices] == expected
    assert permutation.take(np.array(indices)).tolist() == expected


def test_the_order_is_pinned():
    """A change of these numbers changes the data of every run that resumes: it needs another ORDER_VERSION."""
    assert ORDER_VERSION == "feistel8-splitmix64-1"
    assert [Permutation(10, 0, 0)[i] for i in range(10)] == GOLDEN_10
    assert [Permutation(10**9, 42, 3)[i] for i in (0, 1, 999_999_999)] == GOLDEN_1E9


def test_indices_keep_their_shape_and_become_signed():
    permutation = Permutation(100, 0, 0)
    taken = permutation.take(np.arange(12, dtype=np.uint64).reshape(3, 4))
    assert taken.shape == (3, 4)
    assert taken.dtype == np.int64
    assert permutation.take(np.array([], dtype=np.int64)).shape == (0,)


def test_chunks_do_not_show():
    permutation = Permutation(10**6, 0, 0)
    many = permutation.take(np.arange(40_000))
    assert [many[i] for i in (0, 16_383, 16_384, 32_768, 39_999)] == [
        permutation[i] for i in (0, 16_383, 16_384, 32_768, 39_999)
    ]


def test_another_seed_or_epoch_is_another_order():
    orders = [tuple(Permutation(50, seed, epoch)[i] for i in range(50)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbours_are_not_correlated(lag):
    n = 100_000
    taken = Permutation(n, seed=11, epoch=0).take(np.arange(n))
    cells = taken * 8 // n
    counts = np.zeros((8, 8))
    np.add.at(counts, (cells[:-lag], cells[lag:]), 1)
    expected = (n - lag) / 64
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_63


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 0, 0), r"n \(0\)"), ((1, -1, -2), r"seed \(-1\).*epoch \(-2\)"), ((2**62 + 1, 0, 0), "at most 2")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Permutation(*arguments)


@pytest.mark.parametrize("index", [-1, 10])
def test_indices_outside_are_refused(index):
    with pytest.raises(IndexError, match=f"index {index} is outside a permutation of 10"):
        Permutation(10, 0, 0)[index]
    with pytest.raises(IndexError, match=f"index {index} is outside a permutation of 10"):
        Permutation(10, 0, 0).take(np.array([3, index]))


def test_a_billion_elements_cost_nothing_before_they_are_read():
    tracemalloc.start()
    start = time.perf_counter()
    permutation = Permutation(10**9, 0, 0)
    permutation.take(np.arange(1000))
    duration_s = time.perf_counter() - start
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert duration_s < 1
    assert peak_bytes < 2**20
