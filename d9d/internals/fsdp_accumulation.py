"""Accumulate gradients over microbatches under FSDP without a collective until the last of them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from d9d.core.fsdp_internals import (
    accumulate_in_reduce_dtype,
    fsdp_parameters,
    fsdp_units,
    gathered_parameter,
    sum_gradients_now,
)
from d9d.core.placement import refuse_direct_gradient


class FsdpAccumulation:
    """Lets the FSDP units of some modules wait with the sums of their gradients.

    [Note: accumulation under FSDP]
    By default FSDP gathers parameters twice and sums gradients once per unit and *microbatch*. Here a pack of several
    microbatches gathers each unit once and sums once: parameters stay gathered, and gradients stay whole, from the
    first microbatch to the last. This trades memory (full parameters and gradients of the model during the step) for
    time. Where the memory is not there, `keep_sharded` goes back to the default.

    [Note: split backward passes under FSDP]
    FSDP hooks to the gradients of activations, which the second half of a split backward pass does not compute. So where
    a schedule splits them, all passes only accumulate, and the sums are asked for behind the last one. All of it goes
    for the whole passes of such a schedule too: which kind comes last depends on the number of microbatches, and the
    order in which units are summed on the kind.

    Ranks may have different numbers of microbatches: once parameters stay gathered, the number of collectives does not
    depend on it. Whether they do is agreed at the first pack, and must not begin on some ranks only.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        keep_sharded: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Find the units.

        Args:
            modules: Roots of the models of this rank.
            keep_sharded: Sum and free after every microbatch, with the least memory. Needs as many on every rank.
            group: Ranks that may have other numbers of microbatches; None if all callers pass the same number.
            device: Device of the group's collectives.
        """
        self._group = group
        self._device = device
        self._units = [unit for module in modules for unit in fsdp_units(module)]
        for unit in self._units:
            for parameter in fsdp_parameters(unit):
                refuse_direct_gradient(parameter.sharded_param)
        self._keep_sharded = keep_sharded
        self._is_last = True
        self._stays_gathered = False

    def start_pack(self, num_microbatches: int) -> None:
        """Prepare for a number of microbatches that belong to one step, before the first forward pass.

        Raises:
            ValueError: On all ranks, if they have different numbers in the first step and `keep_sharded` forbids it.
        """
        if self._group is not None and self._units:
            num_microbatches = self._agree(num_microbatches, self._group)
            self._group = None
        if num_microbatches > 1 and not self._keep_sharded:
            for unit in self._units if not self._stays_gathered else ():
                unit.set_reshard_after_forward(False, recurse=False)
            self._stays_gathered = True

    def _agree(self, num_microbatches: int, group: dist.ProcessGroup) -> int:
        """Return the largest number of all ranks."""
        extremes = torch.tensor([num_microbatches, -num_microbatches], device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if self._keep_sharded and largest != smallest:
            raise ValueError(
                f"ranks have {smallest} to {largest} microbatches in one step, but with "
                f"gradient_manager.fsdp_keep_sharded: true each microbatch is a collective, so they would wait for "
                f"ever. Set it to false, or give every rank as many."
            )
        return largest

    def before_backward(self, *, is_last: bool) -> None:
        """Sum gradients in the next backward pass if it is the last one of the step, and only then."""
        if is_last == self._is_last or self._keep_sharded:
            return
        self._is_last = is_last
        for unit in self._units:
            unit.set_requires_gradient_sync(is_last, recurse=False)
            unit.set_reshard_after_backward(is_last, recurse=False)

    def after_split_backward(self, *, is_last: bool) -> None:
        """Take the gradients of a pass of a schedule that splits backward passes, and sum them after the last one.

        None of these passes may be announced as the last one by `before_backward`.
        """
        for unit in self._units:
            accumulate_in_reduce_dtype(unit)
        if is_last:
            for unit in self._units:
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)
            sum_gradients_now(self._units)
            self._is_last = True

    def after_update(self) -> None:
        """Free what is gathered, after an optimizer step has changed the shards.

        FSDP does not gather again what it holds: a forward pass without a backward pass just before the step (a hook
        that looks at predictions) would leave the old values in place.
        """
        for unit in self._units:
            unit.reshard()

    def abandon_pack(self) -> None:
        """Drop the gradients that backward passes without a sum have left in the units, after an interruption.

        Returns at once after a complete pack. FSDP offers nothing for this; its `reset_iter_state` keeps them (2.13).
        """
        if self._is_last:
            return
        self.before_backward(is_last=True)
        for unit in self._units:
            for parameter in fsdp_parameters(unit):
                parameter.unsharded_accumulated_grad = None
                gathered = gathered_parameter(parameter)
                if gathered is not None:
                    gathered.grad = None
            unit.reshard()
