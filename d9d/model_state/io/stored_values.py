"""The values of a tensor as a file holds them: which dtypes and tensors it takes, conversion, contiguous bytes."""

import functools
import math
from collections.abc import Iterator

import torch
from safetensors import deserialize
from torch.distributed.tensor import DTensor

from d9d.model_state.io.file_header import DTYPE_NAMES, encoded_header, header_entry

__all__ = [
    "CHUNK_BYTES",
    "as_bytes",
    "check_plain",
    "check_writable_dtype",
    "contiguous_chunks",
    "converted",
    "stored_bytes",
    "stored_dtype",
]

CHUNK_BYTES = 4 * 2**20
"""What is copied at a time of a tensor that cannot be written from where it is: little enough to stay in a cache."""


def stored_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a tensor is stored as.

    Args:
        own: Dtype of the tensor.
        dtype: What floating-point tensors are stored as; None: each as it is.
    """
    return own if dtype is None or not own.is_floating_point else dtype


def stored_bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Return how many bytes a tensor takes in a file; for ``dtype`` see `stored_dtype`."""
    return tensor.numel() * stored_dtype(tensor.dtype, dtype).itemsize


def check_writable_dtype(dtype: torch.dtype, what: str) -> None:
    """Refuse a dtype that no file can hold.

    Args:
        dtype: What is to be stored.
        what: Names the tensor or option in the error.

    Raises:
        ValueError: The format has no such dtype, or the installed library does not read it.
    """
    if dtype not in DTYPE_NAMES or not _is_readable(dtype):
        writable = ", ".join(str(other).removeprefix("torch.") for other in DTYPE_NAMES if _is_readable(other))
        raise ValueError(
            f"{what} has the dtype {dtype}, which safetensors files cannot hold. Convert it to one of: {writable}."
        )


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that have no dense values on this rank: DTensors, sparse and meta tensors.

    Raises:
        ValueError: Naming the tensor.
    """
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"{name} is a DTensor, of which this rank has only a part. Gather it, as "
            f"ModelStateMapperGatherFullTensor({name!r}) and save_model_state do."
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "is on the meta device, without values" if tensor.is_meta else f"has the layout {tensor.layout}"
        raise ValueError(f"{name} {kind}. Files hold dense tensors with values: materialize or convert it.")


def converted(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor as it is stored: floating-point ones in the given dtype, all others as they are.

    Raises:
        ValueError: A finite value is beyond the range of the dtype.
    """
    stored = stored_dtype(tensor.dtype, dtype)
    if stored == tensor.dtype:
        return tensor
    limits = torch.finfo(stored)
    if tensor.numel() and (limits.max < torch.finfo(tensor.dtype).max or limits.min > torch.finfo(tensor.dtype).min):
        # Some dtypes have no infinity and take their largest value instead, so the result does not show it. Narrow ones
        # would round the limits.
        wide = tensor if tensor.itemsize >= torch.float32.itemsize else tensor.float()
        low, high = torch.aminmax(wide)
        # Infinity and NaN, which hide the others, are no news: these are looked at only where there are some.
        if not (limits.min <= low and high <= limits.max) and _finite_beyond(wide, limits):
            raise ValueError(
                f"{name} has values beyond the range of {stored}, which is {limits.min:g} to {limits.max:g}. Store it as "
                f"torch.bfloat16, which has the range of torch.float32, or with its own dtype (dtype=None)."
            )
    return tensor.to(stored)


def contiguous_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in order, as contiguous tensors of at most 4 MiB on its device.

    A view where they already are contiguous; copies of one chunk at a time otherwise.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield from tensor.reshape(-1).split(max(1, CHUNK_BYTES // tensor.itemsize)) if tensor.numel() else ()
    elif tensor.nbytes <= CHUNK_BYTES:
        if tensor.ndim == 2 and tensor.stride(0) < tensor.stride(1):
            # A part of a transposed matrix: copied as it lies in memory, and turned over in the cache, in half the time.
            tensor = tensor.T.contiguous().T
        yield tensor.resolve_conj().resolve_neg().contiguous()
    else:
        row_bytes = tensor.itemsize * math.prod(tensor.shape[1:])
        for rows in tensor.split(max(1, CHUNK_BYTES // row_bytes)):
            yield from contiguous_chunks(rows if len(rows) > 1 else rows[0])


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _finite_beyond(tensor: torch.Tensor, limits: torch.finfo) -> bool:
    return bool((tensor.isfinite() & ((tensor > limits.max) | (tensor < limits.min))).any())


@functools.cache
def _is_readable(dtype: torch.dtype) -> bool:
    """Ask the installed library whether it knows a dtype: older ones lack some."""
    try:
        deserialize(encoded_header({"x": header_entry(dtype, [1], 0)}) + bytes(dtype.itemsize))
    except Exception:  # noqa: BLE001  # the library's errors derive from Exception directly
        return False
    return True
