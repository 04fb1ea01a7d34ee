"""Collect one vector per layer and sequence over the stages of a model."""

import abc
from enum import StrEnum
from typing import assert_never

import torch

from .head.pooling import TokenMean


class HiddenStatesAggregationMode(StrEnum):
    """What is kept of the hidden states of each layer."""

    no = "no"
    """Nothing."""
    mean = "mean"
    """The mean over the tokens that the mask selects."""


class BaseHiddenStatesAggregator(abc.ABC):
    """Takes the hidden states of a stage's layers in order, and hands on what it keeps of them."""

    @abc.abstractmethod
    def add_hidden_states(self, hidden_states: torch.Tensor) -> None:
        """Take the output of the next layer.

        Shapes:
            ``(batch, tokens, hidden_size)``.

        Args:
            hidden_states: Output of the layer.
        """

    @abc.abstractmethod
    def pack_with_snapshot(self, snapshot: torch.Tensor | None) -> torch.Tensor | None:
        """Return what was kept so far, in this stage and before, and forget it here.

        Shapes:
            ``(layers, batch, hidden_size)`` for the argument and the result.

        Args:
            snapshot: The result of the previous stage; None in the first.

        Returns:
            None if nothing was kept.
        """


class NoHiddenStatesAggregator(BaseHiddenStatesAggregator):
    """Keeps nothing."""

    def add_hidden_states(self, hidden_states: torch.Tensor) -> None:
        """Do nothing."""

    def pack_with_snapshot(self, snapshot: torch.Tensor | None) -> torch.Tensor | None:
        """Return None."""
        return None


class MeanHiddenStatesAggregator(BaseHiddenStatesAggregator):
    """Keeps the mean over tokens.

    Args:
        mask: ``(batch, tokens)``, nonzero for the tokens that count; None for all.
        token_mean: What averages; by default over the tokens of this rank.
    """

    def __init__(self, mask: torch.Tensor | None, token_mean: TokenMean | None = None) -> None:
        self._mask = mask
        self._token_mean = token_mean or TokenMean()
        self._means: list[torch.Tensor] = []

    def add_hidden_states(self, hidden_states: torch.Tensor) -> None:
        """Average at once, so that the hidden states themselves are not kept."""
        self._means.append(self._token_mean(hidden_states, self._mask))

    def pack_with_snapshot(self, snapshot: torch.Tensor | None) -> torch.Tensor | None:
        """Append the layers of this stage to those before."""
        means, self._means = self._means, []
        if not means:
            return snapshot
        stacked = torch.stack(means)  # (layers, batch, hidden_size)
        return stacked if snapshot is None else torch.cat((snapshot, stacked))


def create_hidden_states_aggregator(
    mode: HiddenStatesAggregationMode, agg_mask: torch.Tensor | None, token_mean: TokenMean | None = None
) -> BaseHiddenStatesAggregator:
    """Make the aggregator of a mode, for one forward pass of one microbatch.

    Args:
        mode: What is kept.
        agg_mask: ``(batch, tokens)``, nonzero for the tokens that count; None for all.
        token_mean: What averages over tokens: a submodule of the model, which `parallelize_context` finds, for models whose
            ranks have parts of sequences. By default tokens of this rank alone.
    """
    match mode:
        case HiddenStatesAggregationMode.no:
            return NoHiddenStatesAggregator()
        case HiddenStatesAggregationMode.mean:
            return MeanHiddenStatesAggregator(agg_mask, token_mean)
        case _:
            assert_never(mode)
