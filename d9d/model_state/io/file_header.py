"""The header of a safetensors file: JSON that says where each tensor is, after its length and before the data."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from d9d.model_state.io.dtypes import FILE_DTYPES

__all__ = ["ALIGNMENT", "DTYPE_NAMES", "check_name", "encoded_header", "header_entry"]

ALIGNMENT = 8
"""Headers are filled with spaces up to a multiple of it, so that the data is aligned."""

_RESERVED_NAME = "__metadata__"

DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}
"""What the dtypes that files can hold are called in headers."""

_LENGTH_BYTES = 8
_METADATA = {"format": "pt"}
"""Whose conventions the tensors follow. transformers refuses files without it."""


def check_name(name: str) -> None:
    """Raise ValueError for the one name that no tensor can have."""
    if name == _RESERVED_NAME:
        raise ValueError(f"a tensor cannot be called {name}, which safetensors files keep for themselves. Rename it.")


def header_entry(dtype: torch.dtype, shape: Sequence[int], start: int) -> dict[str, Any]:
    """Return what a header says of a tensor.

    Args:
        dtype: What it is stored as.
        shape: Its shape.
        start: Position of its first byte after the header.
    """
    end = start + math.prod(shape) * dtype.itemsize
    return {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def encoded_header(entries: Mapping[str, object], num_bytes: int = 0) -> bytes:
    """Return the first bytes of a file, up to the data.

    Args:
        entries: Of all tensors, by name.
        num_bytes: Least length of the header behind its length, which is filled with spaces; a multiple of 8.
    """
    header = json.dumps({_RESERVED_NAME: _METADATA, **entries}, separators=(",", ":")).encode()
    header = header.ljust(max(num_bytes, -(-len(header) // ALIGNMENT) * ALIGNMENT))
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header
