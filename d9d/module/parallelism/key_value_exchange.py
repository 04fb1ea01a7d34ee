"""Bring keys and values to the queries of other context-parallel ranks, and their gradients back.

Axes: B batch, Hk key and value heads, T tokens of a rank, D dimensions of a head, R ranks.
"""

import abc
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from d9d.core.dist_ops import all_gather, sum_own_part
from d9d.module.parallelism.sequence_sharding import SequenceSharding

__all__ = ["ContextParallelMethod", "KeyValueExchange", "KeysValues", "build_key_value_exchange"]

_TOKENS_DIM = -2
_STATES_TAG, _GRADIENTS_TAG = 0, 1


class ContextParallelMethod(StrEnum):
    """How keys and values come to the queries of other ranks."""

    ring = "ring"
    """From neighbour to neighbour, while those at hand are used: memory for two parts."""
    all_gather = "all_gather"
    """All at once: one collective, and memory for the keys and values of whole sequences in one layer at a time."""


class KeysValues(NamedTuple):
    """Keys and values of the same tokens, or their gradients."""

    keys: torch.Tensor
    """``(B, Hk, T, D)``."""
    values: torch.Tensor
    """``(B, Hk, T, Dv)``."""

    def packed(self) -> torch.Tensor:
        """Return both in one row, so that they travel in one message."""
        return torch.cat((self.keys.reshape(-1), self.values.reshape(-1)))

    def unpacked(self, row: torch.Tensor) -> "KeysValues":
        """Return views of a row that has the shapes of these."""
        keys, values = row.split((self.keys.numel(), self.values.numel()))
        return KeysValues(keys.view(self.keys.shape), values.view(self.values.shape))


class HeldKeys(NamedTuple):
    """Keys and values that are at hand."""

    chunks: tuple[int, ...]
    """Numbers of their chunks in the sequence, ascending."""
    states: KeysValues
    """The tokens of these chunks."""


class KeyValueExchange(abc.ABC):
    """Gives each rank the keys and values of all, part by part. All ranks must call its methods in the same order."""

    @abc.abstractmethod
    def rounds(self, own: KeysValues) -> Iterator[HeldKeys]:
        """Yield keys and values until all ranks' have been there; exhaust it.

        Args:
            own: Those of this rank; of the same shape and dtype on all ranks.
        """

    @abc.abstractmethod
    def collect(self, own: KeysValues, gradients_of: Callable[[HeldKeys], KeysValues]) -> KeysValues:
        """Go through the same rounds, and return the gradients of this rank's keys and values, summed over ranks.

        Args:
            own: As in `rounds`.
            gradients_of: Returns what this rank's queries add to the gradients of what is at hand, in the dtype to sum in.
        """


class RingExchange(KeyValueExchange):
    """Passes keys and values on to the next rank. In the backward pass their gradients follow one round behind.

    Source:
        https://arxiv.org/abs/2310.01889, section 3
    """

    def __init__(self, sharding: SequenceSharding, group: dist.ProcessGroup) -> None:
        self._sharding = sharding
        self._group = group

    def rounds(self, own: KeysValues) -> Iterator[HeldKeys]:
        """Yield this rank's own first, then those of the ranks before it; the next ones are on their way meanwhile."""
        row = own.packed()
        num_ranks, rank = self._group.size(), self._group.rank()
        for step in range(num_ranks):
            transfer = _Shift(row, self._group, _STATES_TAG) if step < num_ranks - 1 else None
            yield HeldKeys(self._sharding.chunks_of((rank - step) % num_ranks), own.unpacked(row))
            if transfer is not None:
                row = transfer.wait()

    def collect(self, own: KeysValues, gradients_of: Callable[[HeldKeys], KeysValues]) -> KeysValues:
        """Let sums of gradients go round behind their keys and values; after R transfers they are at home."""
        transfer: _Shift | None = None
        for held in self.rounds(own):
            added = gradients_of(held).packed()
            if transfer is not None:
                added += transfer.wait()
            transfer = _Shift(added, self._group, _GRADIENTS_TAG)
        assert transfer is not None  # there is at least one round
        return own.unpacked(transfer.wait())


class AllGatherExchange(KeyValueExchange):
    """Gathers keys and values of whole sequences, and reduces their gradients to the ranks that they belong to."""

    def __init__(self, sharding: SequenceSharding, group: dist.ProcessGroup) -> None:
        self._sharding = sharding
        self._group = group

    def rounds(self, own: KeysValues) -> Iterator[HeldKeys]:
        """Yield once, whole sequences."""
        parts = [own.unpacked(row) for row in all_gather(own.packed(), self._group)]
        whole = KeysValues(*(self._sharding.join(tensors, _TOKENS_DIM) for tensors in zip(*parts, strict=True)))
        yield HeldKeys(tuple(range(self._sharding.num_chunks)), whole)

    def collect(self, own: KeysValues, gradients_of: Callable[[HeldKeys], KeysValues]) -> KeysValues:
        """Gather anew, since keeping what was gathered would take the memory of whole sequences in every layer."""
        (gradients,) = (gradients_of(held) for held in self.rounds(own))
        keys, values = (self._sharding.parts(whole, _TOKENS_DIM) for whole in gradients)
        rows = [KeysValues(*part).packed() for part in zip(keys, values, strict=True)]
        return own.unpacked(sum_own_part(torch.stack(rows), self._group))


_EXCHANGES: Final = {
    ContextParallelMethod.ring: RingExchange,
    ContextParallelMethod.all_gather: AllGatherExchange,
}


def build_key_value_exchange(method: ContextParallelMethod, sharding: SequenceSharding) -> KeyValueExchange:
    """Build the exchange of a method over the ranks of a sharding.

    Raises:
        ValueError: If the sharding has no group.
    """
    if sharding.group is None:
        raise ValueError("keys and values are exchanged over a group: make the SequenceSharding with `of` or `over`.")
    return _EXCHANGES[method](sharding, sharding.group)


class _Shift:
    """A row on its way to the next rank of a group, and that of the rank before on its way here.

    Both in one batch: two ranks that each send first would wait for ever where a send is a kernel (NCCL). Over a group
    that nothing else uses, see [Note: a group for attention].
    """

    def __init__(self, row: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, num_ranks = group.rank(), group.size()
        self._sent = row
        self._received = torch.empty_like(row)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, row, group=group, tag=tag, group_peer=(rank + 1) % num_ranks),
                dist.P2POp(dist.irecv, self._received, group=group, tag=tag, group_peer=(rank - 1) % num_ranks),
            ]
        )

    def wait(self) -> torch.Tensor:
        """Return what came, once it may be used; what was sent may be changed from then on."""
        for work in self._works:
            work.wait()
        return self._received
