"""What decoders take and give, stage by stage. Axes: B sequences, T tokens, H hidden size, L layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch

from d9d.module.block.head.base import THeadOutput, THeadShared

__all__ = [
    "SequenceHeadShared",
    "SequenceHeadsOutput",
    "SequenceHeadsShared",
    "SequenceInput",
    "SequenceShared",
    "SequenceTransfer",
]

TLeaf = TypeVar("TLeaf")
"""A tensor, or what describes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """What the first stage takes."""

    input_ids: torch.Tensor
    """``(B, T)`` integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTransfer(Generic[TLeaf]):
    """What a stage hands on to the next, and the last one to the heads."""

    hidden_states: TLeaf
    """``(B, T, H)``; under sequence parallelism this rank's part of the tokens. The last stage has normalised them."""
    hidden_states_snapshot: TLeaf | None = None
    """``(L, B, H)``: what is kept of the outputs of all layers so far, see `HiddenStatesAggregationMode`; None if nothing
    is kept, or before the first layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShared:
    """What all stages need of a microbatch."""

    position_ids: torch.Tensor
    """``(B, T)`` integers: the position of each token in its sequence, from 0."""
    hidden_states_agg_mask: torch.Tensor | None = None
    """``(B, T)``, nonzero for the tokens whose hidden states are kept; None for all."""
    attention_mask: torch.Tensor | None = None
    """Which tokens may be seen, beside causality, as in `SdpaBackend`: four axes that broadcast to
    ``(B, heads, T, T)``, true where a token may be seen. None for all: so it is for padding at the right, whose tokens
    have no labels."""
    token_mask: torch.Tensor | None = None
    """``(B, T)``, nonzero for the tokens that count as load of experts, and for the losses of routers: not for padding, and for
    none of a microbatch without weight. None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHeadShared(Generic[THeadShared]):
    """What all stages need of a microbatch, for a decoder with one head."""

    sequence: SequenceShared
    """For the decoder."""
    head: THeadShared
    """For the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHeadsShared(Generic[THeadShared]):
    """What all stages need of a microbatch, for a decoder with several heads."""

    sequence: SequenceShared
    """For the decoder."""
    heads: Mapping[str, THeadShared]
    """For each head, by its name."""


SequenceHeadsOutput: TypeAlias = dict[str, THeadOutput]
"""What several heads give, by their names."""
