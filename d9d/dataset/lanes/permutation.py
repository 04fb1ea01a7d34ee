"""Pseudo-random permutations that are computed, not stored: the shuffled order of an epoch at any size."""

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["ORDER_VERSION", "Permutation", "mix64"]

ORDER_VERSION = "feistel8-splitmix64-1"
"""Name of the algorithm. It is saved with a position: whoever changes the order that comes out changes the name."""

_NUM_ROUNDS = 8
_MASK_64 = (1 << 64) - 1
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_CHUNK = 1 << 14
"""Indices that are computed at a time: the arrays of a chunk, 128 KiB each, stay in a core's cache."""


def mix64(value: int) -> int:
    """Return the output of the SplitMix64 finaliser, a bijection of 64-bit numbers that looks random.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, with the constants of Vigna's
    public-domain implementation.
    """
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK_64
    return value ^ (value >> 31)


class Permutation:
    """Maps 0..n-1 onto itself in an order that looks random, in constant memory and in any order of access.

    [Note: how an index is permuted]
    The index is cut into two halves of ceil(log2 n) bits in all, which may differ by one bit. Each of 8 rounds XORs a hash
    of one half, keyed by the round, into the other; every round can be undone, so all of them are a bijection of the
    numbers below the next power of two. A result that is not below n goes through once more until one is ("cycle
    walking"): that keeps it a bijection, and takes less than two passes on average, since less than half of the numbers
    are too large. Keys follow from seed and epoch by BLAKE2b.

    Source: Black, Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002 (generalised Feistel, cycle walking).

    Args:
        n: Number of elements, at least 1.
        seed: Seed of the order, at least 0.
        epoch: Another order for each of these, at least 0.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        problems = [
            f"{name} ({value}) must be at least {least}."
            for name, value, least in (("n", n, 1), ("seed", seed, 0), ("epoch", epoch, 0))
            if value < least
        ]
        if n > 1 << 62:
            problems.append(f"n ({n}) must be at most 2**62, so that positions fit into 64 bits.")
        if problems:
            raise ValueError(" ".join(problems))
        self._n = n
        num_bits = max(1, (n - 1).bit_length())
        self._num_low_bits = num_bits - num_bits // 2
        self._low_mask = (1 << self._num_low_bits) - 1
        self._high_mask = (1 << (num_bits // 2)) - 1
        self._keys = _round_keys(seed, epoch)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._n:
            raise IndexError(f"index {index} is outside a permutation of {self._n} elements.")
        result = self._pass(index)
        while result >= self._n:
            result = self._pass(result)
        return result

    def take(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the elements at many indices at once, which is about 50 times as fast as one at a time.

        Args:
            indices: Integers from 0 to n - 1, of any shape.

        Returns:
            Elements in the same shape. They are int64, since NumPy turns sums of uint64 and int64 into floats.

        Raises:
            IndexError: An index is out of range; names the first.
        """
        is_outside = (indices < 0) | (indices >= self._n)
        if np.any(is_outside):
            first = int(indices[is_outside].flat[0])
            raise IndexError(f"index {first} is outside a permutation of {self._n} elements.")
        result = indices.astype(np.uint64).reshape(-1)
        for start in range(0, len(result), _CHUNK):
            self._permute_in_place(result[start : start + _CHUNK])
        return result.reshape(indices.shape).view(np.int64)

    def _permute_in_place(self, values: npt.NDArray[np.uint64]) -> None:
        values[:] = self._pass_array(values)
        (too_large,) = np.nonzero(values >= self._n)
        while len(too_large):
            again = self._pass_array(values[too_large])
            values[too_large] = again
            too_large = too_large[again >= self._n]

    def _pass(self, value: int) -> int:
        high, low = value >> self._num_low_bits, value & self._low_mask
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high ^= mix64(low + even) & self._high_mask
            low ^= mix64(high + odd) & self._low_mask
        return high << self._num_low_bits | low

    def _pass_array(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        num_low_bits, low_mask, high_mask = (
            np.uint64(number) for number in (self._num_low_bits, self._low_mask, self._high_mask)
        )
        high, low = values >> num_low_bits, values & low_mask
        mixed, shifted = np.empty_like(values), np.empty_like(values)
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            _mix64_array(low, even, high_mask, mixed, shifted)
            high ^= mixed
            _mix64_array(high, odd, low_mask, mixed, shifted)
            low ^= mixed
        high <<= num_low_bits
        high |= low
        return high


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    text = f"{ORDER_VERSION}/{seed}/{epoch}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


def _mix64_array(
    values: npt.NDArray[np.uint64],
    key: int,
    mask: np.uint64,
    out: npt.NDArray[np.uint64],
    scratch: npt.NDArray[np.uint64],
) -> None:
    """Write `mix64(values + key) & mask` to `out`. Arithmetic of arrays is modulo 2**64 of itself."""
    np.add(values, np.uint64(key), out=out)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        np.right_shift(out, np.uint64(shift), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, np.uint64(multiplier), out=out)
    np.right_shift(out, np.uint64(31), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.bitwise_and(out, mask, out=out)
