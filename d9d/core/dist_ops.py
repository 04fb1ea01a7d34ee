"""Gathers and exchanges tensors and objects over a process group, on any backend and for every dtype and shape.

[Note: tensors travel as bytes]
Backends differ in the dtypes they take (gloo has no bool or float8 in some collectives). Nothing is computed on the
way, so contiguous copies are viewed as bytes, and all dtypes take one path.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # before torch 2.13, which renamed them
    from torch.distributed import all_gather_into_tensor as all_gather_single  # pyright: ignore[reportDeprecated]
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single  # pyright: ignore[reportDeprecated]

T = TypeVar("T")

_MAX_DIMS = 16
_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
"""All dtypes in an order that is the same on every rank, so that an index stands for one of them."""


@overload
def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: Literal[False] = False
) -> list[torch.Tensor]: ...
@overload
def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: Literal[True]
) -> tuple[list[torch.Tensor], dist.Work]: ...
@overload
def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> list[torch.Tensor] | tuple[list[torch.Tensor], dist.Work]: ...
def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> list[torch.Tensor] | tuple[list[torch.Tensor], dist.Work]:
    """Return the tensors of all ranks of a group, in group order. All ranks of the group must call it.

    Args:
        tensor: Of the same shape and dtype on every rank, which is not checked; any strides.
        group: The ranks.
        async_op: Whether to return at once. The tensors then hold their values after ``wait`` of the returned work.

    Returns:
        Tensors that share one buffer; with ``async_op``, the work as well.
    """
    received = tensor.new_empty((group.size(), *tensor.shape))
    work = _all_gather_bytes(received, tensor, group, async_op)
    tensors = list(received.unbind(0))
    return tensors if work is None else (tensors, work)


@overload
def all_gather_variadic_shape(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: Literal[False] = False
) -> list[torch.Tensor]: ...
@overload
def all_gather_variadic_shape(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: Literal[True]
) -> tuple[list[torch.Tensor], dist.Work]: ...
@overload
def all_gather_variadic_shape(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> list[torch.Tensor] | tuple[list[torch.Tensor], dist.Work]: ...
def all_gather_variadic_shape(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> list[torch.Tensor] | tuple[list[torch.Tensor], dist.Work]:
    """Return the tensors of all ranks of a group, in group order, each in its own shape.

    All ranks of the group must call it. Blocks the host until the shapes are known, also with ``async_op``.

    Args:
        tensor: Of the same dtype on every rank; number and sizes of dimensions may differ, and may be 0.
        group: The ranks.
        async_op: Whether to return before the content has arrived. The tensors then hold their values after ``wait``
            of the returned work.

    Returns:
        Tensors that share one buffer, in which each rank takes as many bytes as the largest; with ``async_op``, the
        work as well.

    Raises:
        ValueError: If dtypes differ, or a tensor has more than 16 dimensions; on all ranks.
    """
    shapes = _all_gather_shapes(tensor, group)
    max_numel = max(shape.numel() for shape in shapes)
    padded = tensor.new_zeros(max_numel)
    padded[: tensor.numel()].copy_(tensor.reshape(-1))
    received = tensor.new_empty((group.size(), max_numel))
    work = _all_gather_bytes(received, padded, group, async_op)
    tensors = [row[: shape.numel()].view(shape) for row, shape in zip(received.unbind(0), shapes, strict=True)]
    return tensors if work is None else (tensors, work)


@overload
def gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, group_dst: int, async_op: Literal[False] = False
) -> list[torch.Tensor] | None: ...
@overload
def gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, group_dst: int, async_op: Literal[True]
) -> tuple[list[torch.Tensor] | None, dist.Work]: ...
@overload
def gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, group_dst: int, async_op: bool
) -> list[torch.Tensor] | tuple[list[torch.Tensor] | None, dist.Work] | None: ...
def gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, group_dst: int, async_op: bool = False
) -> list[torch.Tensor] | tuple[list[torch.Tensor] | None, dist.Work] | None:
    """Return the tensors of all ranks of a group on one of them. All ranks of the group must call it.

    Args:
        tensor: Of the same shape and dtype on every rank, which is not checked; any strides.
        group: The ranks.
        group_dst: Rank within the group that receives.
        async_op: Whether to return at once. The tensors then hold their values after ``wait`` of the returned work.

    Returns:
        Tensors in group order, which share one buffer, on the receiver; None on the others. With ``async_op``, the
        work as well.
    """
    tensors: list[torch.Tensor] | None = None
    rows: list[torch.Tensor] | None = None
    if group.rank() == group_dst:
        received = tensor.new_empty((group.size(), *tensor.shape))
        tensors = list(received.unbind(0))
        rows = [_as_bytes(row) for row in tensors]
    work = dist.gather(_as_bytes(tensor), rows, group=group, group_dst=group_dst, async_op=async_op)
    return (tensors, cast("dist.Work", work)) if async_op else tensors


def gather_variadic_shape(tensor: torch.Tensor, group: dist.ProcessGroup, group_dst: int) -> list[torch.Tensor] | None:
    """Return the tensors of all ranks of a group on one of them, each in its own shape.

    All ranks of the group must call it. Each rank sends exactly its bytes, and returns when they are on their way out
    of its tensor, so that the tensor may be changed at once.

    Args:
        tensor: Of the same dtype on every rank; number and sizes of dimensions may differ, and may be 0.
        group: The ranks.
        group_dst: Rank within the group that receives.

    Returns:
        Tensors in group order on the receiver; None on the others.

    Raises:
        ValueError: If dtypes differ, or a tensor has more than 16 dimensions; on all ranks.
    """
    shapes = _all_gather_shapes(tensor, group)
    if group.rank() != group_dst:
        if tensor.numel():
            _run_p2p([dist.P2POp(dist.isend, _as_bytes(tensor), group=group, group_peer=group_dst)])
        return None
    received = [tensor.new_empty(shape) for shape in shapes]
    received[group_dst].copy_(tensor)
    _run_p2p(
        [
            dist.P2POp(dist.irecv, _as_bytes(target), group=group, group_peer=peer)
            for peer, target in enumerate(received)
            if peer != group_dst and target.numel()
        ]
    )
    return received


def exchange_rows(
    rows: torch.Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send each rank of a group its part of the rows, and return those that came, in group order.

    All ranks of the group must call it. It records no graph. On an accelerator it does not block the host.

    Shapes:
        ``(sum(num_sent), ...)`` to ``(sum(num_received), ...)``.

    Args:
        rows: Of the same dtype and size of a row on every rank; any strides.
        num_sent: How many rows each rank gets, in group order; may be 0.
        num_received: How many rows come from each rank: what they have said for this one.
        group: The ranks.
    """
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    received = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(
        _as_bytes(received),
        _as_bytes(rows),
        [count * row_bytes for count in num_received],
        [count * row_bytes for count in num_sent],
        group=group,
    )
    return received


def sum_own_part(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the ranks of a group of what each has for this one. All ranks of the group must call it.

    It records no graph.

    Shapes:
        ``(ranks, ...)`` to ``(...)``.

    Args:
        parts: What this rank has for each rank, in group order; of the same shape and dtype on every rank.
        group: The ranks.
    """
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    # Flat: gloo wants shapes that are concatenated along the first dimension.
    reduce_scatter_single(own.view(-1), parts.detach().reshape(-1), group=group)
    return own


def all_gather_object(obj: T, group: dist.ProcessGroup) -> list[T]:
    """Return the objects of all ranks of a group, in group order. All ranks of the group must call it.

    Blocks the host. Objects are pickled: for trusted peers and small values only.
    """
    objects: list[T | None] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return cast("list[T]", objects)


def gather_object(obj: T, group: dist.ProcessGroup, group_dst: int) -> list[T] | None:
    """Return the objects of all ranks of a group on one of them. All ranks of the group must call it.

    Blocks the host. Objects are pickled: for trusted peers and small values only.

    Args:
        obj: Object of this rank.
        group: The ranks.
        group_dst: Rank within the group that receives.

    Returns:
        Objects in group order on the receiver; None on the others.
    """
    objects = cast("list[T | None]", [None] * group.size()) if group.rank() == group_dst else None
    dist.gather_object(obj, objects, group=group, group_dst=group_dst)
    return cast("list[T] | None", objects)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a flat row of bytes, after a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _all_gather_bytes(
    received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    work = all_gather_single(_as_bytes(received), _as_bytes(sent), group=group, async_op=async_op)
    return cast("dist.Work", work) if async_op else None


def _all_gather_shapes(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Size]:
    """Return the shape of each rank's tensor, after all ranks have seen that the tensors fit together."""
    sizes = list(tensor.shape)[:_MAX_DIMS]
    header = [_DTYPES.index(tensor.dtype), tensor.ndim, *sizes, *[0] * (_MAX_DIMS - len(sizes))]
    headers = torch.stack(all_gather(torch.tensor(header, dtype=torch.int64, device=tensor.device), group)).tolist()
    _check_headers(headers)
    return [torch.Size(row[2 : 2 + row[1]]) for row in headers]


def _check_headers(headers: Sequence[Sequence[int]]) -> None:
    dtypes = [_DTYPES[row[0]] for row in headers]
    if len(set(dtypes)) > 1:
        found = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in enumerate(dtypes))
        raise ValueError(f"Tensors to gather must have one dtype, but the ranks of the group have {found}.")
    for rank, row in enumerate(headers):
        if row[1] > _MAX_DIMS:
            raise ValueError(
                f"Rank {rank} of the group gathers a tensor of {row[1]} dimensions; at most {_MAX_DIMS} are supported."
            )


def _run_p2p(operations: list[dist.P2POp]) -> None:
    # Waiting matters to the sender as well: it keeps the bytes alive, and its tensor unchanged, until they are out.
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
