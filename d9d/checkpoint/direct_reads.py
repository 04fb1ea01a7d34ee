"""Read parts of files into the memory of tensors, by several threads and without a copy between."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from d9d.checkpoint.digest import io_threads

__all__ = ["MemoryRun", "is_plain_memory", "read_runs"]

_MAX_BYTES = 16 << 20
"""What one thread reads at a time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """Elements that follow each other in a file and in memory."""

    start: int
    """Offset of the first one in the file, in bytes."""
    target: torch.Tensor
    """Where they go; see `is_plain_memory`."""


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor follow each other in memory of the host, as they would in a file."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def read_runs(path: Path, runs: Sequence[MemoryRun]) -> None:
    """Read parts of a file. Blocks.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it ends before one of them does.
    """
    with path.open("rb", buffering=0) as file:
        pieces = [piece for run in runs for piece in _pieces(run)]
        read = functools.partial(_read_piece, file.fileno())
        is_complete = io_threads().map(read, pieces) if len(pieces) > 1 else map(read, pieces)
        if not all(list(is_complete)):
            raise ValueError(f"{path} is damaged: it ends before a tensor in it does")


def _pieces(run: MemoryRun) -> Iterator[tuple[int, memoryview]]:
    memory = memoryview(run.target.view(-1).view(torch.uint8).numpy().data)
    for start in range(0, len(memory), _MAX_BYTES):
        yield run.start + start, memory[start : start + _MAX_BYTES]


def _read_piece(descriptor: int, piece: tuple[int, memoryview]) -> bool:
    offset, memory = piece
    while memory:
        num_read = os.preadv(descriptor, [memory], offset)
        if num_read == 0:
            return False
        offset, memory = offset + num_read, memory[num_read:]
    return True
