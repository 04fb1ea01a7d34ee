"""Moves device tensors to the host and back while every reference to them stays valid."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from d9d.core.device import pin_memory_supported

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext


class SleepTag(StrEnum):
    """What a sleeping job gives up."""

    TENSOR_STATES = "tensor_states"
    """Device memory of parameters, gradient buffers and optimizer states."""
    COMMS = "comms"
    """Communicators and their device memory."""


DEFAULT_SLEEP_TAGS: Iterable[SleepTag] = frozenset({SleepTag.TENSOR_STATES})
"""What `sleep` gives up when it is not told: the tensors. Building communicators anew takes seconds to minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadContext:
    """How to offload."""

    dist_context: "DistributedContext"
    """The ranks of the job."""
    pin_memory: bool
    """Whether host copies are page-locked: faster both ways, but the system can not swap them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnloadContext:
    """Where to load back to."""

    dist_context: "DistributedContext"
    """The ranks of the job; tensors go back to its current device."""


@runtime_checkable
class Offloadable(Protocol):
    """Holds device tensors that can wait on the host."""

    def offload(self, ctx: OffloadContext) -> None:
        """Move the tensors to the host and free their device memory."""
        ...

    def onload(self, ctx: OnloadContext) -> None:
        """Bring the tensors back."""
        ...

    def is_offloaded(self) -> bool:
        """Tell whether the tensors are on the host now."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadedTensor:
    """The content of a tensor that is away from its device."""

    host: torch.Tensor
    """Copy on the CPU, of the local shard for a `DTensor`."""


def offload_tensor(tensor: torch.Tensor, *, pin_memory: bool) -> OffloadedTensor:
    """Copy a tensor to the host and free its device memory. Blocks the host until the copy is done.

    The tensor object stays what it is (a parameter of its module, a key of the optimizer state) but is empty until
    `onload_tensor`. For a `DTensor` the local shard is moved; no rank needs to wait for another. Memory that the tensor
    shares with others is freed when all of them are offloaded; they do not share it afterwards.

    Args:
        tensor: Tensor to empty in place.
        pin_memory: Whether the host copy is page-locked. Ignored for devices that do not profit.
    """
    local = _local_tensor(tensor)
    host = torch.empty_like(local, device="cpu", pin_memory=pin_memory and pin_memory_supported(local.device))
    host.copy_(local)
    local.data = local.data.new_empty(0)
    return OffloadedTensor(host)


def onload_tensor(tensor: torch.Tensor, offloaded: OffloadedTensor, *, device: torch.device) -> None:
    """Fill a tensor that `offload_tensor` emptied with its content, on the device.

    Args:
        tensor: The same tensor object.
        offloaded: What `offload_tensor` returned for it.
        device: Device type that the tensor was on.
    """
    local = _local_tensor(tensor)
    # On CPU `to` returns its argument, and the host copy may be pinned or still be read by others.
    local.data = offloaded.host.to(device, copy=True)


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # With gradients enabled this would be a new tensor each time, whose data is not the shard's.
    with torch.no_grad():
        return tensor.to_local()
