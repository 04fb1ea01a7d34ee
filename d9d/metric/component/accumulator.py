"""Running values and their reduction over ranks."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, assert_never, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.device import accumulator_dtype

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext


class MetricReduceOp(StrEnum):
    """How observations of one rank, and running values of all ranks, become one value."""

    sum = "sum"
    max = "max"
    min = "min"


_REDUCE_OPS: dict[MetricReduceOp, dist.ReduceOp.RedOpType] = {
    MetricReduceOp.sum: dist.ReduceOp.SUM,
    MetricReduceOp.max: dist.ReduceOp.MAX,
    MetricReduceOp.min: dist.ReduceOp.MIN,
}


class MetricAccumulator(Stateful):
    """A running value of this rank, and the value over all ranks as of the last reduction.

    The running value never takes in what other ranks have seen, so reducing twice counts nothing twice.
    """

    def __init__(self, initial_value: torch.Tensor, reduce_op: MetricReduceOp = MetricReduceOp.sum) -> None:
        """Start at a value.

        Args:
            initial_value: Neutral element of the reduction, in the dtype to accumulate in: a float64 or int64 sum
                counts exactly up to 2**53 or 2**63, a float32 sum stops at 2**24. On a device without float64 it
                becomes float32.
            reduce_op: The reduction.
        """
        self._initial = initial_value.detach().clone()
        self._local = self._initial.clone()
        self._synced: torch.Tensor | None = None
        self._reduce_op = reduce_op

    @property
    def reduce_op(self) -> MetricReduceOp:
        """The reduction."""
        return self._reduce_op

    @property
    def local_value(self) -> torch.Tensor:
        """The running value of this rank itself; not to be changed."""
        return self._local

    @property
    def value(self) -> torch.Tensor:
        """The value over all ranks as of the last reduction, or that of this rank if it has been updated since."""
        # The running value is updated in place, so a result that is still to be logged must not be it.
        return self._local.clone() if self._synced is None else self._synced

    def update(self, value: torch.Tensor | float | bool) -> None:
        """Take in an observation of this rank. Does not block the host if the value is on the same device.

        Args:
            value: Of a shape that broadcasts to that of the accumulator.

        Raises:
            ValueError: If an accumulator of integers is given fractions.
        """
        observed = torch.as_tensor(value).detach()
        if observed.is_floating_point() and not self._local.is_floating_point():
            raise ValueError(f"an accumulator of {self._local.dtype} would cut fractions off a {observed.dtype} value.")
        observed = observed.to(device=self._local.device, dtype=self._local.dtype)
        self._synced = None
        match self._reduce_op:
            case MetricReduceOp.sum:
                self._local += observed
            case MetricReduceOp.max:
                self._local = torch.maximum(self._local, observed)
            case MetricReduceOp.min:
                self._local = torch.minimum(self._local, observed)
            case _:
                assert_never(self._reduce_op)

    def sync(self, dist_context: "DistributedContext | None" = None) -> None:
        """Reduce a copy of the running value. All ranks must call it. See `sync_accumulators` for several at once.

        Args:
            dist_context: Reduces over its ``data_group``. None, for code that has no context at hand, reduces over all
                ranks of the default process group, if there is one: right unless tensor-parallel peers see the same
                data.
        """
        if dist_context is not None:
            group = dist_context.data_group
        else:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        sync_accumulators([self], group)

    def set_synced(self, value: torch.Tensor) -> None:
        """Take the value over all ranks, which `value` returns until the next update."""
        self._synced = value

    def reset(self) -> None:
        """Go back to the initial value."""
        self._local = self._initial.clone()
        self._synced = None

    def to(self, device: str | torch.device | int) -> None:
        """Move to a device; float64 becomes float32 where the device lacks it."""
        target = torch.empty(0, device=device).device
        dtype = accumulator_dtype(target) if self._local.dtype == torch.float64 else self._local.dtype
        self._initial = self._initial.to(device=target, dtype=dtype)
        self._local = self._local.to(device=target, dtype=dtype)
        self._synced = None if self._synced is None else self._synced.to(device=target, dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the running value of this rank."""
        return {"value": self._local}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a running value.

        Raises:
            ValueError: If it has another shape.
        """
        value: torch.Tensor = state_dict["value"]
        if value.shape != self._local.shape:
            raise ValueError(
                f"the saved accumulator has shape {tuple(value.shape)}, but this one has {tuple(self._local.shape)}."
            )
        self._local = value.detach().to(device=self._local.device, dtype=self._local.dtype, copy=True)
        self._synced = None


@runtime_checkable
class AccumulatorOwner(Protocol):
    """A metric whose `sync` does nothing but reduce these accumulators, so that a container may do it for many."""

    def accumulators(self) -> Sequence[MetricAccumulator]:
        """Return the accumulators, in an order that is the same on all ranks."""
        ...


def sync_accumulators(accumulators: Iterable[MetricAccumulator], group: dist.ProcessGroup | None) -> None:
    """Reduce copies of running values with one all-reduce per dtype and operation. All ranks must call it.

    Args:
        accumulators: In an order that is the same on all ranks, on the device of the group.
        group: Ranks to reduce over; None makes a local copy.
    """
    packs: dict[tuple[torch.dtype, MetricReduceOp, torch.device], list[MetricAccumulator]] = {}
    for accumulator in accumulators:
        local = accumulator.local_value
        packs.setdefault((local.dtype, accumulator.reduce_op, local.device), []).append(accumulator)
    for (dtype, reduce_op, _), members in packs.items():
        # Concatenating copies, also if there is one member only: `all_reduce` works in place.
        packed = torch.cat([member.local_value.reshape(-1) for member in members])
        if group is not None:
            # Backends do not reduce bool; its maximum and minimum are those of bytes.
            carrier = packed.view(torch.uint8) if dtype == torch.bool else packed
            dist.all_reduce(carrier, op=_REDUCE_OPS[reduce_op], group=group)
        shapes = [member.local_value.shape for member in members]
        parts = packed.split([shape.numel() for shape in shapes])
        for member, part, shape in zip(members, parts, shapes, strict=True):
            member.set_synced(part.view(shape))
