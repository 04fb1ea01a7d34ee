"""Names for the values that travel between data, model, pipeline and trackers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

TLeaf = TypeVar("TLeaf")
TBatch = TypeVar("TBatch")

# A dataclass of any kind may be a node, so the type system can not say more than Any; the parameter documents the leaf.
PyTree: TypeAlias = TLeaf | Any
"""A nest of dicts, lists, tuples, named tuples and dataclasses whose leaves are of one type; None is an empty node."""

TensorTree: TypeAlias = PyTree[torch.Tensor]
"""A `PyTree` of tensors."""

ScalarTree: TypeAlias = PyTree[str | float | int | bool]
"""A `PyTree` of plain values, such as hyperparameters."""

CollateFn: TypeAlias = Callable[[Sequence[Any]], PyTree[Any]]
"""Makes one microbatch from a list of samples."""

MicrobatchPack: TypeAlias = Sequence[TBatch]
"""The microbatches that one optimizer step consumes on this rank, in order. They may differ in shape."""


@dataclass(frozen=True)
class IdleMicrobatch(Generic[TBatch]):
    """Stands in a pack for a microbatch that this rank does not have, while other ranks run theirs.

    The model runs it, so that ranks stay together in collectives. Its output goes nowhere, and its loss weighs nothing.
    """

    batch: TBatch
    """Microbatch to run, with samples that count elsewhere."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor that does not exist yet. It is a leaf of a `PyTree`, although it is a dataclass."""

    shape: tuple[int, ...]
    """Size of each dimension."""
    dtype: torch.dtype
    """Element type."""
    layout: torch.layout = torch.strided
    """Memory layout."""
