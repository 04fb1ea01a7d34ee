"""Frequencies of rotary embeddings, and how they are stretched for contexts longer than those of the training."""

import math
from abc import ABC, abstractmethod

import torch


def _plain_inverse_frequencies(rope_base: float, head_dim: int) -> torch.Tensor:
    # On the host also while a model is built on the meta device: these are constants, not states.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    return float(rope_base) ** -exponents


class RopeScaling(ABC):
    """How fast each pair of dimensions turns from one position to the next."""

    @abstractmethod
    def inverse_frequencies(self, rope_base: float, head_dim: int) -> torch.Tensor:
        """Return the angle in radians by which each pair of dimensions turns per position.

        Shapes:
            ``(head_dim // 2,)``, fp64, on the CPU, fastest first.

        Args:
            rope_base: Base of the geometric series of wavelengths ("theta").
            head_dim: Number of dimensions that are rotated.
        """

    @property
    def attention_mscale(self) -> float:
        """Factor on cosines and sines, so its square is on the attention logits of the rotated dimensions."""
        return 1.0


class NoRopeScaling(RopeScaling):
    """The frequencies as published: ``base ** (-2 i / head_dim)``.

    Source:
        https://arxiv.org/abs/2104.09864
    """

    def inverse_frequencies(self, rope_base: float, head_dim: int) -> torch.Tensor:
        """Return the plain frequencies."""
        return _plain_inverse_frequencies(rope_base, head_dim)


class LinearRopeScaling(RopeScaling):
    """Position interpolation: all pairs turn slower by one factor.

    Source:
        https://arxiv.org/abs/2306.15595

    Args:
        factor: How many times longer the context becomes.
    """

    def __init__(self, factor: float) -> None:
        _check_factor(factor)
        self._factor = factor

    def inverse_frequencies(self, rope_base: float, head_dim: int) -> torch.Tensor:
        """Return the plain frequencies over the factor."""
        return _plain_inverse_frequencies(rope_base, head_dim) / self._factor


class NtkRopeScaling(RopeScaling):
    """A larger base: the slowest pair turns slower by the factor, the fastest pair keeps its pace.

    The base is multiplied by ``factor ** (head_dim / (head_dim - 2))``.

    Source:
        https://arxiv.org/abs/2309.00071, section 3.1

    Args:
        factor: How many times longer the context becomes.
    """

    def __init__(self, factor: float) -> None:
        _check_factor(factor)
        self._factor = factor

    def inverse_frequencies(self, rope_base: float, head_dim: int) -> torch.Tensor:
        """Return the plain frequencies of the larger base.

        Raises:
            ValueError: If only two dimensions are rotated: they have one pace, which must not change and must.
        """
        if head_dim <= 2:
            raise ValueError(f"NTK scaling needs more than 2 rotated dimensions, got {head_dim}. Use linear scaling.")
        base = rope_base * self._factor ** (head_dim / (head_dim - 2))
        return _plain_inverse_frequencies(base, head_dim)


class YarnRopeScaling(RopeScaling):
    """Slow pairs are interpolated, fast ones kept, with a linear ramp between; logits are sharpened.

    Source:
        https://arxiv.org/abs/2309.00071, sections 3.2 and 3.4

    Args:
        factor: How many times longer the context becomes.
        beta_fast: Pairs that turn more often than this over the original context keep their pace.
        beta_slow: Pairs that turn less often than this over the original context are interpolated fully.
        original_max_position_embeddings: Length of the original context in tokens.
        mscale: Weight of the logarithm in `attention_mscale`; DeepSeek's models set both, and divide one by the other.
        mscale_all_dim: As `mscale`, for the divisor. Only both together have an effect.
        truncate: Whether the ends of the ramp are rounded to whole pairs, outwards.
    """

    def __init__(
        self,
        factor: float,
        beta_fast: float,
        beta_slow: float,
        original_max_position_embeddings: int,
        *,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> None:
        _check_factor(factor)
        if beta_fast <= beta_slow:
            raise ValueError(f"beta_fast ({beta_fast}) must be greater than beta_slow ({beta_slow}). Swap them.")
        self._factor = factor
        self._beta_fast = beta_fast
        self._beta_slow = beta_slow
        self._original_length = original_max_position_embeddings
        self._mscale = mscale
        self._mscale_all_dim = mscale_all_dim
        self._truncate = truncate

    def inverse_frequencies(self, rope_base: float, head_dim: int) -> torch.Tensor:
        """Return a mix of the plain frequencies and the interpolated ones."""
        plain = _plain_inverse_frequencies(rope_base, head_dim)
        first = self._pair_that_turns(self._beta_fast, rope_base, head_dim)
        last = self._pair_that_turns(self._beta_slow, rope_base, head_dim)
        if self._truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # The published code's way out where the ramp has no length.
        length = last - first or 0.001
        pairs = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
        interpolated = ((pairs - first) / length).clamp(0, 1)
        return plain * (1 - interpolated) + plain / self._factor * interpolated

    def _pair_that_turns(self, times: float, rope_base: float, head_dim: int) -> float:
        """Index, with a fraction, of the pair that turns this many times over the original context."""
        radians_per_position = times * 2 * math.pi / self._original_length
        return -head_dim * math.log(radians_per_position) / (2 * math.log(rope_base))

    @property
    def attention_mscale(self) -> float:
        """``0.1 ln(factor) + 1``; with both `mscale` and `mscale_all_dim`, the ratio of the two."""
        if self._mscale and self._mscale_all_dim:
            return yarn_mscale(self._factor, self._mscale) / yarn_mscale(self._factor, self._mscale_all_dim)
        return yarn_mscale(self._factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return YaRN's ``0.1 weight ln(factor) + 1``, and one where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Llama3RopeScaling(RopeScaling):
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended by their frequency.

    Source:
        https://arxiv.org/abs/2407.21783; the formula is in the code published with the weights.

    Args:
        factor: How many times slower the slow pairs turn.
        low_freq_factor: Pairs with less than this many turns over the original context are interpolated.
        high_freq_factor: Pairs with more than this many turns over the original context are kept.
        original_max_position_embeddings: Length of the original context in tokens.
    """

    def __init__(
        self, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position_embeddings: int
    ) -> None:
        _check_factor(factor)
        if high_freq_factor <= low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({high_freq_factor}) must be greater than low_freq_factor ({low_freq_factor})."
            )
        self._factor = factor
        self._low = low_freq_factor
        self._high = high_freq_factor
        self._original_length = original_max_position_embeddings

    def inverse_frequencies(self, rope_base: float, head_dim: int) -> torch.Tensor:
        """Return a mix of the plain frequencies and the interpolated ones."""
        plain = _plain_inverse_frequencies(rope_base, head_dim)
        turns = self._original_length * plain / (2 * math.pi)
        kept = ((turns - self._low) / (self._high - self._low)).clamp(0, 1)
        return plain * kept + plain / self._factor * (1 - kept)


def _check_factor(factor: float) -> None:
    if factor <= 0:
        raise ValueError(f"the factor of a rope scaling must be positive, got {factor}. 1.0 stretches nothing.")
