"""Rounding to bfloat16 that is right on average, and AdamW that writes bfloat16 parameters by it.

[Note: Stochastic rounding]

A bfloat16 number has 8 bits of precision: an update below 1/512 of a weight is lost when it is rounded to the nearest, each
time. Rounded up with a probability that is the part of the gap that it covers, it is kept on average. A bfloat16 number is the
upper half of an fp32 number, so adding a random number of 16 bits to its bits, and cutting the lower half off, does that.

Replicas of a parameter must be given generators in the same state, or they drift apart.

Source: "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192, section 4.
"""

from typing import Final

import torch

_LOWER_BITS: Final = 16
_UPPER_MASK: Final = -(1 << _LOWER_BITS)
_LARGEST: Final = torch.finfo(torch.bfloat16).max


@torch.no_grad()
def copy_fp32_to_bf16_stochastic_(
    target: torch.Tensor, source: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Write fp32 values into a bfloat16 tensor, rounded up or down at random, and return that tensor.

    On average the values are those of the source. Those that bfloat16 has are copied; those that are not finite, or beyond its
    largest, become what `Tensor.copy_` makes of them. See [Note: Stochastic rounding].

    Args:
        target: bfloat16.
        source: fp32, of the same shape.
        generator: Random numbers, one for each element; by default torch's own.

    Raises:
        ValueError: If dtypes or shapes are others.
    """
    if (target.dtype, source.dtype) != (torch.bfloat16, torch.float32) or target.shape != source.shape:
        raise ValueError(
            f"stochastic rounding writes float32 into bfloat16 of the same shape, not {source.dtype} "
            f"{tuple(source.shape)} into {target.dtype} {tuple(target.shape)}."
        )
    noise = torch.randint(1 << _LOWER_BITS, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    rounded = noise.add_(source.view(torch.int32)).bitwise_and_(_UPPER_MASK).view(torch.float32)
    # Not at the end of the range: there the sum of bits would run into infinity, or change its sign.
    return target.copy_(torch.where(source.abs() < _LARGEST, rounded, source))


@torch.no_grad()
def adamw_stochastic_bf16_(
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    generator: torch.Generator | None = None,
) -> None:
    """Take a step of AdamW, in place, computed in fp32. What is stored in bfloat16 is rounded stochastically.

    Shapes:
        All tensors have the same.

    Args:
        params: Parameter, bfloat16.
        grads: Its gradient, in any floating point dtype.
        exp_avg: Running average of gradients, fp32 or bfloat16.
        exp_avg_sq: Running average of their squares, fp32 or bfloat16.
        lr: Learning rate.
        beta1: Decay rate of the first average.
        beta2: Decay rate of the second average.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay, times the learning rate.
        step: Number of this step, from 1.
        generator: Random numbers; by default torch's own.

    Source:
        https://arxiv.org/abs/1711.05101, algorithm 2
    """
    wide_grads = grads.float()
    mean, square = exp_avg.float(), exp_avg_sq.float()  # the states themselves, if they are fp32
    mean.lerp_(wide_grads, 1 - beta1)
    square.mul_(beta2).addcmul_(wide_grads, wide_grads, value=1 - beta2)
    denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    wide = params.float().mul_(1 - lr * weight_decay)
    wide.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
    copy_fp32_to_bf16_stochastic_(params, wide, generator)
    for stored, value in ((exp_avg, mean), (exp_avg_sq, square)):
        if stored is not value:
            copy_fp32_to_bf16_stochastic_(stored, value, generator)
