"""Moves device tensors to the host and back while every reference to them stays valid."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from d9d.core.device import pin_memory_supported, release_cached_memory, synchronize
from d9d.core.placement import local_tensor

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
    local = local_tensor(tensor)
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
    local = local_tensor(tensor)
    # On CPU `to` returns its argument, and the host copy may be pinned or still be read by others.
    local.data = offloaded.host.to(device, copy=True)


class MovableMemory:
    """The memory of many tensors, which goes to the host and comes back as it was: tensors that share memory still do.

    [Note: memory that leaves]
    Parameters, their shards as FSDP gathers them, the leaves that modules compute with and views that an optimizer keeps are
    different tensors over the same memory, and not all of them can be found. So memory is what is freed and allocated anew
    (the storage), which no tensor over it notices. Reading a tensor meanwhile would end the process, so those that are known
    are empty until then.
    """

    def __init__(self) -> None:
        """Start with all memory on its device."""
        self._emptied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._contents: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._is_offloaded = False

    @property
    def is_offloaded(self) -> bool:
        """Whether the memory is on the host now."""
        return self._is_offloaded

    @torch.no_grad()
    def offload(self, tensors: Iterable[torch.Tensor], ctx: OffloadContext) -> None:
        """Copy the memory of tensors to the host and free it on the device; does nothing if it is away already.

        Blocks the host until the memory is free. Tensors on other devices stay, as does memory of another owner than torch.

        Args:
            tensors: Plain tensors, or DTensors, whose local shards are taken.
            ctx: How to offload.
        """
        if self._is_offloaded:
            return
        device = ctx.dist_context.current_device
        pins = ctx.pin_memory and pin_memory_supported(device)
        members = {id(local): local for local in map(local_tensor, tensors) if _is_movable(local, device)}
        storages = {storage.data_ptr(): storage for storage in (local.untyped_storage() for local in members.values())}
        contents = [
            (storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins))
            for storage in storages.values()
        ]
        for storage, host in contents:
            host.copy_(_bytes_of(storage), non_blocking=True)
        synchronize(device)
        self._emptied = [(local, local.data) for local in members.values()]
        self._contents, self._is_offloaded = contents, True
        for local, _ in self._emptied:
            local.data = local.new_empty(0)
        for storage, _ in contents:
            storage.resize_(0)
        release_cached_memory(device)

    @torch.no_grad()
    def onload(self, ctx: OnloadContext) -> None:
        """Allocate the memory and fill it; does nothing if it is on the device already. Blocks the host until it is done."""
        for storage, host in self._contents:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=True)
        for local, data in self._emptied:
            local.data = data
        # Pinned memory may be used for something else once it is let go.
        synchronize(ctx.dist_context.current_device)
        self._emptied, self._contents, self._is_offloaded = [], [], False


def _is_movable(local: torch.Tensor, device: torch.device) -> bool:
    storage = local.untyped_storage()
    return local.device.type == device.type and storage.nbytes() > 0 and storage.resizable()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
