"""Stochastic rounding for kernels written in Triton; to import this module, Triton must be installed."""
# Triton is optional, so nothing is known of its types.
# pyright: reportUnknownVariableType=false

from typing import Any

from d9d.kernel.optional import import_kernel

triton = import_kernel("d9d.kernel.stochastic.ops", "triton", "triton")
# Triton finds the names that a kernel uses among the globals of its module.
tl = import_kernel("d9d.kernel.stochastic.ops", "triton.language", "triton")


@triton.jit
# In quotes: Triton's compiler looks into annotations, and refuses globals other than its own.
def fp32_to_bf16_kernel(val_fp32: "Any", offsets: "Any", seed: "int") -> "Any":  # noqa: ANN401  # Triton's tensors
    """Round fp32 values to bfloat16, up or down at random, inside of a kernel.

    Those that bfloat16 has stay; those that are not finite, or beyond its largest, become what Triton's conversion makes
    of them. See [Note: Stochastic rounding].

    Args:
        val_fp32: Block of values.
        offsets: Which random number each of them takes, integers of the same shape.
        seed: Start of the random numbers.
    """
    noise = tl.randint(seed, offsets).to(tl.uint32, bitcast=True) & 0xFFFF
    upper = (val_fp32.to(tl.uint32, bitcast=True) + noise) >> 16
    rounded = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    # The largest number of bfloat16. From there the sum of bits would run into infinity, or change its sign.
    return tl.where(tl.abs(val_fp32) < 3.3895313892515355e38, rounded, val_fp32.to(tl.bfloat16))
