"""Losses that count for different amounts, such as means over different numbers of tokens.

A step may return ``{"loss": mean, "loss_weight": count}``. The loss of an optimizer step is then the weighted mean over all
microbatches of all data-parallel ranks, ``sum(loss * weight) / sum(weight)``, whatever they are cut into. Backward passes
start from ``loss * weight``, and gradients are divided once, when the total weight is known.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from d9d.core.device import accumulator_dtype
from d9d.core.side_loss import LOSS_SCALE, announce_loss
from d9d.core.types import PyTree
from d9d_lightning.steps.microbatches import merge_outputs

__all__ = ["LossWeights", "merge_training_outputs", "scaled", "with_announced_loss"]

_KEY = "loss_weight"


class LossWeights:
    """Adds up the weights of the losses of an optimizer step."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Begin a step without weights.

        Args:
            group: Ranks with other samples; None on one process.
            device: Device of this rank.
        """
        self._group = group
        self._device = device
        self._weights: list[torch.Tensor] = []
        self._num_unweighted = 0
        self._is_weighted: bool | None = None

    # `Any`: what the user's step has returned.
    def weigh(self, loss: torch.Tensor, output: PyTree[Any], share: float) -> torch.Tensor:
        """Return what the backward pass of a microbatch starts from: `scaled` by its `factor`."""
        return scaled(loss, self.factor(output, share))

    def factor(self, output: PyTree[Any], share: float) -> float:
        """Return what the loss of a microbatch counts for, and note its weight.

        Args:
            output: What the step has returned.
            share: What the microbatch counts for if the step gives no weight.

        Raises:
            ValueError: If a weight is negative, not finite or not one number.
            RuntimeError: If some microbatches of the step come with a weight, and others without.
        """
        given = output.get(_KEY) if isinstance(output, Mapping) else None
        if given is None:
            self._num_unweighted += 1
            self._refuse_mixture()
            return share
        weight = torch.as_tensor(given).detach()
        if weight.numel() != 1:
            raise ValueError(f"training_step returned a {_KEY} of shape {tuple(weight.shape)}: it must be one number.")
        # Waits for an accelerator, unless the weight is a number or on the host.
        value = float(weight)
        if not 0 <= value < float("inf"):
            raise ValueError(f"training_step returned a {_KEY} of {value}: it must be at least 0, and finite.")
        self._weights.append(weight.to(self._device, accumulator_dtype(self._device)).reshape(()))
        self._refuse_mixture()
        return value

    @property
    def has_weights(self) -> bool:
        """Whether a microbatch of this step came with a weight, on this rank."""
        return bool(self._weights)

    def clear(self) -> None:
        """Forget a step that will not be finished."""
        self._weights.clear()
        self._num_unweighted = 0

    def take_own_total(self) -> torch.Tensor | None:
        """Return the weight of the step on this rank, a scalar; None if it has none. Begins the next step."""
        total = torch.stack(self._weights).sum() if self._weights else None
        self.clear()
        return total

    def _refuse_mixture(self) -> None:
        if self._weights and self._num_unweighted:
            raise RuntimeError(
                f"training_step returned a {_KEY} for {len(self._weights)} of {len(self._weights) + self._num_unweighted} "
                f"microbatches of a step. Return it always, or never."
            )

    def inverse_total(self, own_total: torch.Tensor | None) -> torch.Tensor | None:
        """Return 1 / the weight of the step over all ranks, a scalar; None if there are no weights.

        All ranks of the group must call it.

        Args:
            own_total: Weight of this rank.

        Raises:
            RuntimeError: On all ranks, if some give weights and others do not, or the total is 0.
        """
        is_weighted = own_total is not None
        if self._is_weighted is None:
            self._is_weighted = is_weighted
            if self._group is not None:
                _agree(is_weighted, self._group, self._device)
        elif is_weighted != self._is_weighted:
            # Other ranks would wait for the total, or not: this is not asked of them at each step.
            raise RuntimeError(
                f"training_step returned a {_KEY} in the first step {'and none' if self._is_weighted else 'not, but one'} "
                f"now. Return it always, or never."
            )
        if own_total is None:
            return None
        total = own_total.clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        if float(total) == 0:
            raise RuntimeError(
                f"the {_KEY} of all microbatches of this step is 0 on all ranks, so there is nothing to learn from. Check "
                f"the labels of the data, or leave such batches out."
            )
        return 1.0 / total


# `Any`: what the user's step has returned.
def with_announced_loss(output: PyTree[Any]) -> PyTree[Any]:
    """Let losses that layers have attached know the factor of the loss that a step has returned, if there are any."""
    if not LOSS_SCALE.is_awaited:
        return output
    if isinstance(output, torch.Tensor):
        return announce_loss(output)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": announce_loss(output["loss"])}
    return output


def scaled(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``loss * factor``, which has a gradient of exactly 0 where the factor is 0, also if the loss is not finite."""
    if factor == 0:
        _silence(loss)
        return torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss)
    return loss * factor


def merge_training_outputs(outputs: Sequence[PyTree[Any]], shares: Sequence[float]) -> PyTree[Any]:
    """Put together what ``training_step`` has returned for the microbatches of a batch, as `merge_outputs` does.

    But where they have weights, the loss is the mean by these, which are added up. The host does not wait for the device.

    Args:
        outputs: In order of the microbatches, of equal structure, with the loss or without it.
        shares: Part of each microbatch in the batch.

    Raises:
        TypeError: See `merge_outputs`.
    """
    merged = merge_outputs(outputs, shares)
    # Of equal structure: the weights are in all outputs or in none.
    if not isinstance(merged, Mapping) or merged.get(_KEY) is None:
        return merged
    given = [output[_KEY] for output in outputs]
    weights = [torch.as_tensor(weight).detach().reshape(()) for weight in given]
    merged = {**merged, _KEY: sum(given[1:], start=given[0])}
    if "loss" in merged:
        losses = torch.stack([output["loss"] for output in outputs])
        dtype = torch.promote_types(losses.dtype, torch.float32)
        by_loss = torch.stack([weight.to(losses.device, dtype) for weight in weights])
        # A loss without weight may be 0 / 0, and so may the mean.
        total = torch.where(by_loss == 0, 0.0, losses * by_loss).sum()
        merged["loss"] = torch.where(by_loss.sum() == 0, 0.0, total / by_loss.sum()).to(losses.dtype)
    return merged


def _agree(is_weighted: bool, group: dist.ProcessGroup, device: torch.device) -> None:
    counts = torch.tensor([int(is_weighted), 1], device=device)
    dist.all_reduce(counts, group=group)
    num_weighted, num_ranks = counts.tolist()
    if num_weighted not in (0, num_ranks):
        raise RuntimeError(
            f"training_step returned a {_KEY} on {num_weighted} of {num_ranks} data-parallel ranks. Return it always, or "
            f"never."
        )


def _silence(loss: torch.Tensor) -> None:
    """Let every gradient below a loss be 0, also where it would be 0 * infinity, as behind 0 / 0."""
    pending = [loss.grad_fn]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            node.register_hook(_zeros)
            pending += [following for following, _ in node.next_functions]


def _zeros(
    grad_inputs: tuple[torch.Tensor | None, ...], grad_outputs: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in grad_inputs)
