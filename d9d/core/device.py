"""Resolve the device type once, so that nothing else in the package names an accelerator."""

import contextlib
import os
from collections.abc import Generator

import torch
import torch.distributed as dist

DEVICE_VARIABLE = "D9D_DEVICE"
"""Environment variable that overrides the detected device type, e.g. ``cpu`` on a machine with GPUs."""


def resolve_device_type() -> str:
    """Return the device type that this process computes on.

    It is the accelerator that PyTorch finds, or ``cpu``. The environment variable ``D9D_DEVICE`` overrides it.

    Raises:
        ValueError: If ``D9D_DEVICE`` names a device type that is not available here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if accelerator is None else accelerator.type
    wanted = os.environ.get(DEVICE_VARIABLE, found)
    if wanted not in ("cpu", found):
        valid = " or ".join(dict.fromkeys(("cpu", found)))
        raise ValueError(f"{DEVICE_VARIABLE}={wanted}: this machine offers {valid}. Set it to {valid}, or unset it.")
    return wanted


def local_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of a process and make it the current one.

    Args:
        device_type: A device type, as of `resolve_device_type`.
        local_rank: Index of the process on its node.

    Raises:
        ValueError: If the node has fewer devices than processes.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"local rank {local_rank} has no {device_type} device: this node has {num_devices}. "
            f"Start at most {num_devices} processes per node, or set {DEVICE_VARIABLE}=cpu."
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank)


def communication_backend(device_type: str) -> str:
    """Return the backend string of ``init_process_group`` for a device type; CPU tensors always go over gloo."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def synchronize(device: torch.device) -> None:
    """Block the host until the device has finished all queued work. Returns at once on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_cached_memory(device: torch.device) -> None:
    """Give memory of the device that torch holds but does not use back to other processes. Does nothing on CPU."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating point type of the device, for sums that must stay exact beyond 2**24."""
    return torch.float32 if device.type == "mps" else torch.float64


def pin_memory_supported(device: torch.device) -> bool:
    """Tell whether copies to the device profit from page-locked host memory."""
    return device.type not in ("cpu", "mps")


@contextlib.contextmanager
def side_stream(device: torch.device) -> Generator[torch.Stream | None]:
    """Run the block on a new stream that starts after what the current stream has queued so far.

    Yields the stream, or None on CPU, where the block runs as usual. Whoever reads the results on another stream waits
    for the yielded one first, and keeps the inputs of the block alive until then.
    """
    if device.type == "cpu":
        yield None
        return
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield stream


class HostCopy:
    """A small device tensor on its way to the host.

    [Note: reading a flag without draining the device]
    ``tensor.item()`` waits for everything that was queued before it. This copy is queued on a stream of its own behind
    the producer only, so that by the time the host asks for the value the copy has long finished, while the main
    stream still works through the backward pass. On CPU the tensor is already there.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Queue the copy of ``tensor`` behind the work of the current stream."""
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        with side_stream(tensor.device) as stream:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory_supported(tensor.device))
            self._host.copy_(tensor, non_blocking=True)
            # The source is freed only after the side stream has read it.
            self._source = tensor
            if stream is not None:
                self._event = stream.record_event()

    def read(self) -> torch.Tensor:
        """Return the host tensor, waiting for the copy alone."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def join_stream(stream: torch.Stream | None) -> None:
    """Let the current stream wait for what `side_stream` has queued on a stream. The host does not wait."""
    if stream is not None:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the random generators of the host and of the device, as byte tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device.type).get_rng_state()
    return state


def set_random_state(device: torch.device, state: dict[str, torch.Tensor]) -> None:
    """Restore what `random_state` returned on a device of the same type."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device.type).set_rng_state(state["device"])
