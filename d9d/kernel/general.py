"""Types of Triton."""

from typing import Any

from d9d.kernel.optional import import_kernel


# What is returned is a type of a package that may not be there.
def get_int_dtype(bitwidth: int, signed: bool) -> Any:  # noqa: ANN401
    """Return Triton's integer type of a width.

    Args:
        bitwidth: 8, 16, 32 or 64.
        signed: Whether it has negative numbers.

    Raises:
        ImportError: If Triton is not installed.
        ValueError: If there is no such type.
    """
    if bitwidth not in (8, 16, 32, 64):
        raise ValueError(f"Triton has integers of 8, 16, 32 and 64 bits, not of {bitwidth}.")
    language = import_kernel("d9d.kernel.general.get_int_dtype", "triton.language", "triton")
    return {
        8: (language.uint8, language.int8),
        16: (language.uint16, language.int16),
        32: (language.uint32, language.int32),
        64: (language.uint64, language.int64),
    }[bitwidth][signed]
