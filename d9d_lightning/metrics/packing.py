"""Sends nests of tensors and plain values between ranks: one header, and one row of bytes for all that a rank has.

[Note: failures travel too]
A rank that cannot pack what it has still takes part, and sends the reason in place of its values. So all ranks raise the
same error, and none waits for one that has given up.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from d9d.core.dist_ops import all_gather

# JSON cannot be described by a type that pyright follows without help at each step.
Tree: TypeAlias = Any
"""A nest of dicts with string keys, lists and tuples over tensors, bytes, dtypes and plain values."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_PACKED, _FAILED, _ABSENT = range(3)
"""What a rank's row is, as the first number of its header: values, the reason why there are none, or nothing."""


class ExchangeError(RuntimeError):
    """Some rank could not send or use values, and all have been told."""


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    num_outline_bytes: int
    content: torch.Tensor  # (bytes,), the outline first
    error: Exception | None = None  # of this rank


class _Packer:
    """Writes tensors to a row of bytes, and the rest to an outline that says where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[torch.Tensor] = []
        self._num_bytes = 0
        # Metrics of a compute group share their states, which travel once. The tensors are alive as long as the tree.
        self._places: dict[int, tuple[int, int]] = {}

    def outline(self, tree: Tree) -> Tree:
        """Return a sendable tree as JSON has it, after its tensors have been added to the row."""
        if tree is None or type(tree) in (bool, int, float, str):
            return tree
        if isinstance(tree, torch.Tensor):
            return {"tensor": [str(tree.dtype), list(tree.shape), *self._place(tree)]}
        if isinstance(tree, bytes):
            return {"bytes": self._append(_from_bytes(tree, self._device))}
        if isinstance(tree, torch.dtype):
            return {"dtype": str(tree)}
        if type(tree) is dict:
            return {"dict": {key: self.outline(value) for key, value in tree.items()}}
        children = [self.outline(value) for value in tree]
        return children if type(tree) is list else {"tuple": children}

    def row(self, outline: Tree) -> _Row:
        text = _from_bytes(json.dumps(outline, separators=(",", ":")).encode(), self._device)
        return _Row(_PACKED, len(text), torch.cat([text, *self._parts]))

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = self._append(_as_bytes(tensor, self._device))
        return self._places[id(tensor)]

    def _append(self, part: torch.Tensor) -> tuple[int, int]:
        place = (self._num_bytes, len(part))
        self._parts.append(part)
        self._num_bytes += len(part)
        return place


def check_sendable(value: object) -> None:
    """Refuse a value that cannot be sent: see `Tree`.

    Raises:
        TypeError: Saying why.
    """
    if isinstance(value, DTensor):
        raise TypeError("a DTensor cannot be sent to other ranks: keep its `full_tensor()` or `to_local()`")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(f"a tensor of {value.layout} and {value.dtype} on {value.device} cannot be sent")
    elif type(value) in (list, tuple):
        for element in cast("list[object]", value):
            check_sendable(element)
    elif type(value) is dict and all(type(key) is str for key in cast("dict[object, object]", value)):
        for element in cast("dict[str, object]", value).values():
            check_sendable(element)
    elif value is not None and type(value) not in (bool, int, float, str, bytes, torch.dtype):
        raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def gather_trees(
    build: Callable[[], Tree] | None, group: dist.ProcessGroup, device: torch.device
) -> list[tuple[int, Tree]]:
    """Return the trees of those ranks of a group that have one, each after its group rank. All ranks must call it.

    Two collectives. Blocks the host until the sizes are known.

    Args:
        build: Returns this rank's tree; None if the rank has nothing to add. Its errors are those of all ranks.
        group: The ranks.
        device: Where the tensors travel and arrive.

    Raises:
        ExchangeError: On all ranks, if one of them could not build or pack its tree.
    """
    row = _pack(build, device)
    header = torch.tensor([row.status, row.num_outline_bytes, len(row.content)], device=device)
    headers = cast("list[list[int]]", torch.stack(all_gather(header, group)).tolist())
    width = max(num_bytes for _, _, num_bytes in headers)
    padded = row.content.new_zeros(width)
    padded[: len(row.content)] = row.content
    contents = all_gather(padded, group)
    rows = [_Row(status, outline, contents[rank][:size]) for rank, (status, outline, size) in enumerate(headers)]
    ranks = dist.get_process_group_ranks(group)
    failures = [
        f"rank {rank}: {_reason(other)}" for rank, other in zip(ranks, rows, strict=True) if other.status == _FAILED
    ]
    if failures:
        raise ExchangeError("; ".join(failures)) from row.error
    return [(rank, _unpack(other)) for rank, other in enumerate(rows) if other.status == _PACKED]


def broadcast_tree(
    build: Callable[[], Tree] | None, group: dist.ProcessGroup, source: int, device: torch.device
) -> Tree:
    """Return the tree of one rank of a group on all of them. All ranks must call it.

    Two collectives. Blocks the host until the size is known.

    Args:
        build: Returns the tree on the source, which gets its own; other ranks pass None.
        group: The ranks.
        source: Group rank that has the tree.
        device: Where the tensors travel and arrive.

    Raises:
        ExchangeError: On all ranks, if the source could not build or pack the tree.
    """
    row = _pack(build, device)
    header = torch.tensor([row.status, row.num_outline_bytes, len(row.content)], device=device)
    dist.broadcast(header, group=group, group_src=source)
    status, num_outline_bytes, num_bytes = cast("list[int]", header.tolist())
    content = row.content if group.rank() == source else row.content.new_empty(num_bytes)
    dist.broadcast(content, group=group, group_src=source)
    received = _Row(status, num_outline_bytes, content)
    if status == _FAILED:
        raise ExchangeError(_reason(received)) from row.error
    return _unpack(received)


def _pack(build: Callable[[], Tree] | None, device: torch.device) -> _Row:
    if build is None:
        return _Row(_ABSENT, 0, torch.empty(0, dtype=torch.uint8, device=device))
    try:
        tree = build()
        check_sendable(tree)
        packer = _Packer(device)
        return packer.row(packer.outline(tree))
    except Exception as error:  # noqa: BLE001  # [Note: failures travel too]
        reason = str(error) if isinstance(error, ExchangeError) else f"{type(error).__name__}: {error}"
        return _Row(_FAILED, 0, _from_bytes(reason.encode(), device), error)


def _reason(row: _Row) -> str:
    return _to_bytes(row.content).decode()


def _unpack(row: _Row) -> Tree:
    outline = json.loads(_to_bytes(row.content[: row.num_outline_bytes]))
    return _fill(outline, row.content[row.num_outline_bytes :])


def _fill(outline: Tree, content: torch.Tensor) -> Tree:
    if isinstance(outline, list):
        return [_fill(value, content) for value in cast("list[Tree]", outline)]
    if not isinstance(outline, Mapping):
        return outline
    [(kind, value)] = cast("Mapping[str, Any]", outline).items()
    match kind:
        case "tensor":
            dtype, shape, offset, num_bytes = value
            # The copy is aligned for its dtype, and does not keep the bytes of all ranks alive.
            return content[offset : offset + num_bytes].clone().view(_DTYPES[dtype]).view(shape)
        case "bytes":
            offset, num_bytes = value
            return _to_bytes(content[offset : offset + num_bytes])
        case "dtype":
            return _DTYPES[value]
        case "tuple":
            return tuple(_fill(element, content) for element in value)
        case _:
            return {key: _fill(element, content) for key, element in value.items()}


def _from_bytes(text: bytes, device: torch.device) -> torch.Tensor:
    if not text:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _to_bytes(content: torch.Tensor) -> bytes:
    return content.cpu().numpy().tobytes()


def _as_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    plain = tensor.detach().to(device).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
