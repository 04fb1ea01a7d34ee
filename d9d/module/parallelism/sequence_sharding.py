"""Which tokens of a sequence a context-parallel rank holds, and how batches are cut and put together again.

Axes: B batch, T tokens of a whole sequence, R context-parallel ranks.
"""

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, assert_never, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.dist_context import BATCH_DOMAIN, DistributedContext
from d9d.core.dist_ops import all_gather, sum_own_part

__all__ = ["SequenceOrder", "SequenceSharding", "document_ids", "document_mask"]


class SequenceOrder(StrEnum):
    """How the chunks of a sequence are dealt to ranks."""

    zigzag = "zigzag"
    """Of 2 R chunks, rank r has numbers r and 2 R - 1 - r: under a causal mask all ranks have equal work."""
    contiguous = "contiguous"
    """Of R chunks, rank r has number r: equal work where every token sees all others, or a window of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSharding:
    """Cuts sequences into the parts of context-parallel ranks. With one rank, nothing is changed."""

    num_ranks: int
    """R."""
    rank: int
    """Coordinate of this rank."""
    order: SequenceOrder = SequenceOrder.zigzag
    """Which tokens a rank has; the same as in `parallelize_context`."""
    group: dist.ProcessGroup | None = None
    """The ranks, for `gather`."""

    @classmethod
    def of(
        cls, dist_context: DistributedContext, order: SequenceOrder | str = SequenceOrder.zigzag
    ) -> "SequenceSharding":
        """Describe the part of this rank in a job; one without context parallelism has one part.

        Args:
            dist_context: Topology of the job.
            order: Which tokens a rank has.
        """
        if not dist_context.is_distributed:
            return cls(num_ranks=1, rank=0, order=SequenceOrder(order))
        return cls.over(dist_context.mesh_for(BATCH_DOMAIN)["cp"], order)

    @classmethod
    def over(cls, mesh: DeviceMesh, order: SequenceOrder | str = SequenceOrder.zigzag) -> "SequenceSharding":
        """Describe the part of this rank over a mesh.

        Args:
            mesh: Mesh with one dimension, ``mesh_for(BATCH_DOMAIN)["cp"]``.
            order: Which tokens a rank has.

        Raises:
            ValueError: If the mesh has more than one dimension.
        """
        if mesh.ndim != 1:
            raise ValueError(
                f"sequences are cut over one mesh dimension, got {mesh.mesh_dim_names}. "
                'Pass the one of the batch domain that joins both degrees: mesh_for(BATCH_DOMAIN)["cp"].'
            )
        return cls(
            num_ranks=mesh.size(), rank=mesh.get_local_rank(), order=SequenceOrder(order), group=mesh.get_group()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceSharding":
        """Return itself, for copies of modules that hold it; groups can not be copied."""
        return self

    @property
    def chunks_per_rank(self) -> int:
        """Number of chunks that a rank has."""
        match self.order:
            case SequenceOrder.zigzag:
                return 2 if self.num_ranks > 1 else 1
            case SequenceOrder.contiguous:
                return 1
            case _:
                assert_never(self.order)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sequence; divides its length."""
        return self.num_ranks * self.chunks_per_rank

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the chunks that a rank has, in the order in which it has them."""
        return (rank,) if self.chunks_per_rank == 1 else (rank, self.num_chunks - 1 - rank)

    def check_length(self, num_tokens: int) -> None:
        """Refuse a length that can not be cut into equal chunks.

        Raises:
            ValueError: With the nearest lengths that can.
        """
        if num_tokens % self.num_chunks == 0 and num_tokens > 0:
            return
        shorter = num_tokens - num_tokens % self.num_chunks
        valid = [str(length) for length in (shorter, self.padded_length(num_tokens)) if length > 0]
        raise ValueError(
            f"a sequence of {num_tokens} tokens can not be cut into {self.num_chunks} equal chunks for "
            f"{self.num_ranks} context-parallel ranks ({self.order} order). Valid lengths are multiples of "
            f"{self.num_chunks}, such as {' or '.join(valid)}. `pad` fills sequences up."
        )

    def padded_length(self, num_tokens: int) -> int:
        """Return the smallest valid length that is not below a given one."""
        return max(num_tokens + -num_tokens % self.num_chunks, self.num_chunks)

    def pad(self, whole: torch.Tensor, value: float, dim: int = 1) -> torch.Tensor:
        """Append padding up to a valid length.

        Under a causal mask no token sees it. Labels get `LM_IGNORE_INDEX`; without a causal mask, the attention mask has
        to hide it.

        Args:
            whole: Tensor of whole sequences.
            value: What padding consists of.
            dim: Dimension of tokens.
        """
        num_tokens = whole.shape[dim]
        missing = self.padded_length(num_tokens) - num_tokens
        return F.pad(whole, [0, 0] * (whole.ndim - 1 - dim % whole.ndim) + [0, missing], value=value)

    def shard(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of whole sequences; differentiable, no communication.

        Cut all that has tokens alike: ids, position ids, and labels *after* they were shifted against the inputs. Of an
        attention mask with a row per query, cut the rows (``dim=2``), as keys are seen whole.

        Shapes:
            ``(B, T, ...)`` to ``(B, T / R, ...)``.

        Args:
            whole: Tensor of whole sequences, the same on all ranks.
            dim: Dimension of tokens.

        Raises:
            ValueError: If the length can not be cut into equal chunks.
        """
        self.check_length(whole.shape[dim])
        if self.num_ranks == 1:
            return whole
        chunks = whole.chunk(self.num_chunks, dim)
        return torch.cat([chunks[number] for number in self.chunks_of(self.rank)], dim)

    def gather(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return whole sequences from the parts of all ranks. All ranks must call it, and its backward pass.

        Differentiable: the gradient of a part is the sum of what all ranks do with it, as their losses are added.

        Shapes:
            ``(B, T / R, ...)`` to ``(B, T, ...)``.

        Args:
            part: Of the same shape and dtype on all ranks.
            dim: Dimension of tokens.
        """
        if self.num_ranks == 1:
            return part
        # Autograd functions are untyped.
        return cast("torch.Tensor", _GatherSequence.apply(self, dim, part))

    def position_ids(self, num_tokens: int, device: torch.types.Device = None) -> torch.Tensor:
        """Return the positions of this rank's tokens in the whole sequence.

        Shapes:
            ``(1, T / R)``, which broadcasts over the batch.

        Args:
            num_tokens: T, of the whole sequence.
            device: Where to build them.

        Raises:
            ValueError: If the length can not be cut into equal chunks.
        """
        return self.shard(torch.arange(num_tokens, device=device).unsqueeze(0))

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Put the parts of all ranks together, given in the order of ranks."""
        chunks: list[torch.Tensor | None] = [None] * self.num_chunks
        for rank, part in enumerate(parts):
            for number, chunk in zip(self.chunks_of(rank), part.chunk(self.chunks_per_rank, dim), strict=True):
                chunks[number] = chunk
        return torch.cat([chunk for chunk in chunks if chunk is not None], dim)

    def parts(self, whole: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Cut whole sequences into the parts of all ranks: what `join` undoes."""
        chunks = whole.chunk(self.num_chunks, dim)
        return [torch.cat([chunks[number] for number in self.chunks_of(rank)], dim) for rank in range(self.num_ranks)]


def document_ids(lengths: Sequence[int] | torch.Tensor, num_tokens: int | None = None) -> torch.Tensor:
    """Return which document each token of a packed sequence belongs to.

    Shapes:
        ``(T,)`` integers; -1 for padding behind the last document, which `document_mask` keeps apart.

    Args:
        lengths: Tokens of each document, in order, such as `PackedSequence.lengths`; of cumulative lengths it is
            ``cu_seqlens.diff()``.
        num_tokens: T; by default the sum of the lengths.

    Raises:
        ValueError: If documents have more than `num_tokens` tokens, or a negative number.
    """
    counts = torch.as_tensor(lengths)
    total = int(counts.sum())
    if bool((counts < 0).any()) or (num_tokens is not None and total > num_tokens):
        raise ValueError(
            f"documents of {counts.tolist()} tokens do not fit into a sequence of {num_tokens}. Give the tokens of each "
            "document: cu_seqlens.diff(), if you have cumulative lengths."
        )
    ids = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return F.pad(ids, (0, 0 if num_tokens is None else num_tokens - total), value=-1)


def document_mask(query_ids: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
    """Return the attention mask of packed sequences, whose documents see nothing of each other.

    Padding (a negative id) is seen by padding alone. Causality is left to the layer.

    Shapes:
        ``(B, Tq)`` and ``(B, Tk)`` to booleans ``(B, 1, Tq, Tk)``.

    Args:
        query_ids: Documents of the queries, see `document_ids`: those of this rank, from `SequenceSharding.shard`.
        key_ids: Documents of all keys: those of the whole sequence.
    """
    return (query_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)).unsqueeze(1)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharding: SequenceSharding, dim: int, part: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # takes what is put on it
        assert sharding.group is not None  # several ranks have one
        ctx.sharding, ctx.dim = sharding, dim
        return sharding.join(all_gather(part, sharding.group), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        sharding: SequenceSharding = ctx.sharding
        assert sharding.group is not None
        parts = torch.stack(sharding.parts(grad, ctx.dim))
        return None, None, sum_own_part(parts, sharding.group)
