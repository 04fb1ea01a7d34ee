"""Give a model on the meta device its memory and its first values, the same ones on every mesh.

[Note: initial values that do not depend on the mesh]
A shard must hold what one process would have put there. So the code of the model runs on full tensors: while a module
initialises itself, its own sharded parameters are replaced by full plain tensors, one module at a time, and each rank
then keeps its part. The random generator is seeded from the name of the module, so that neither the order nor the
other modules on this rank matter (a pipeline rank builds some layers only). A model whose root initialises the
parameters of its children directly reaches them as DTensors; random numbers are drawn full there too, by a dispatch
mode.
"""

import contextlib
import hashlib
from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.core.compute_leaf import bind_compute_leaves
from d9d.core.placement import local_tensor, shard_of

_RANDOM_IN_PLACE = frozenset(
    [
        torch.ops.aten.bernoulli_,
        torch.ops.aten.cauchy_,
        torch.ops.aten.exponential_,
        torch.ops.aten.geometric_,
        torch.ops.aten.log_normal_,
        torch.ops.aten.normal_,
        torch.ops.aten.random_,
        torch.ops.aten.uniform_,
    ]
)
"""Operations that fill a tensor with random numbers."""


@torch.no_grad()
def materialize_module(
    module: nn.Module, device: torch.device, seed: int, *, group: dist.ProcessGroup | None = None
) -> None:
    """Allocate the local shard of every parameter and buffer and initialise it by ``reset_parameters``.

    Every module with a ``reset_parameters`` method that the root's method calls, directly or not, is initialised by it.
    Values depend on the seed, the module's name and its code alone, not on the mesh.

    Args:
        module: Root of a model that is already parallelised, in part or whole on the meta device.
        device: Where the shards go.
        seed: Seed of the values, the same on all ranks.
        group: Ranks that build the same module and must fail together; all of them must call this.

    Raises:
        TypeError: If the root has no ``reset_parameters``.
        RuntimeError: If a parameter or buffer was left untouched, with the names of all of them.
    """
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise TypeError(
            f"{type(module).__name__} has no reset_parameters(). It was built on the meta device, without values: "
            f"add a method that initialises every parameter and buffer in place."
        )
    module.to_empty(device=device)
    bind_compute_leaves(module)
    poisoned = {name: _poison(local_tensor(tensor)) for name, tensor in _named_tensors(module)}
    with contextlib.ExitStack() as stack:
        # The random state of the caller is none of our business.
        stack.enter_context(torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]))
        stack.enter_context(_FullRandom())
        for name, child in module.named_modules():
            stack.enter_context(_initialise_by_name(child, name, seed))
        module.reset_parameters()  # pyright: ignore[reportCallIssue]  # checked above
    untouched = [
        name
        for name, tensor in _named_tensors(module)
        if name in poisoned and _is_poison(local_tensor(tensor), poisoned[name])
    ]
    _raise_together(type(module).__name__.removeprefix("FSDP"), untouched, group)


class _FullRandom(TorchDispatchMode):
    """Draws random numbers for a DTensor as if it were whole, and keeps the part of this rank."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # any operation
        target = args[0] if args else None
        if func.overloadpacket in _RANDOM_IN_PLACE and isinstance(target, DTensor):
            full = torch.empty(target.shape, dtype=target.dtype, device=local_tensor(target).device)
            func(full, *args[1:], **(kwargs or {}))
            local_tensor(target).copy_(shard_of(full, target))
            return target
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _initialise_by_name(module: nn.Module, name: str, seed: int) -> Generator[None]:
    """Wrap ``reset_parameters`` of one module: seeded by its name, on full tensors."""
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        yield
        return

    def reset_full() -> None:
        with torch.random.fork_rng(devices=_random_devices(module)), _full_parameters(module):
            torch.manual_seed(_seed_of(name, seed))
            reset()

    vars(module)["reset_parameters"] = reset_full
    try:
        yield
    finally:
        del vars(module)["reset_parameters"]


@contextlib.contextmanager
def _full_parameters(module: nn.Module) -> Generator[None]:
    """Replace the sharded parameters of one module, not of its children, by full tensors, and keep their parts."""
    sharded = {
        name: parameter
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) and name not in vars(module)
    }
    for name, parameter in sharded.items():
        device = local_tensor(parameter).device
        full = torch.full(parameter.shape, _poison_value(parameter.dtype), dtype=parameter.dtype, device=device)
        module._parameters[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for name, parameter in sharded.items():
            full = module._parameters[name]
            assert full is not None  # put there above
            local_tensor(parameter).copy_(shard_of(full, parameter))
            module._parameters[name] = parameter


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def _random_devices(module: nn.Module) -> list[torch.device]:
    devices = {tensor.device for _, tensor in _named_tensors(module)}
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _poison_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    # A boolean has no value that no model would choose; see _is_poison.
    return False if dtype == torch.bool else torch.iinfo(dtype).max - 1


def _poison(tensor: torch.Tensor) -> int:
    """Fill a tensor with a value that no initialisation leaves, and return its version."""
    tensor.fill_(_poison_value(tensor.dtype))
    return tensor._version


def _is_poison(tensor: torch.Tensor, version: int) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.dtype == torch.bool:
        # Only writes that autograd can see are noticed here, which is all but `.data`.
        return tensor._version == version
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return bool((tensor == _poison_value(tensor.dtype)).all())


def _raise_together(model: str, untouched: list[str], group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks if any of them found a tensor untouched: a shard may be empty on some."""
    names = set(untouched)
    if group is not None:
        found: list[list[str]] = [[] for _ in range(group.size())]
        dist.all_gather_object(found, untouched, group=group)
        names = {name for rank_names in found for name in rank_names}
    if names:
        raise RuntimeError(
            f"reset_parameters() of {model} left {len(names)} parameters or buffers without values, in whole or in "
            f"part: {', '.join(sorted(names))}. Initialise each of them there, in place."
        )
