"""Give a model on the meta device its memory and its first values, the same ones on every mesh.

[Note: initial values that do not depend on the mesh]
A shard must hold what one process would have put there. So the code of the model runs on full tensors: while a module
initialises itself, its own sharded parameters are replaced by full plain tensors, one module at a time, and each rank
then keeps its part. The random generator is seeded from the name of the module, so that neither the order nor the
other modules on this rank matter (a pipeline rank builds some layers only). A model whose root initialises the
parameters of its children directly reaches them as DTensors; random numbers are drawn full there too, by a dispatch
mode.

[Note: stages that use the same names]
Stages that number their layers from 0 each, or whose root initialises everything by itself, would draw the same numbers
again and again. So where several stages of a pipeline have a module of one name, all but the first of them are seeded
from the number of the stage too. Their values then depend on how the model was cut; names that are unique over the whole
model, such as the layer's number in it, avoid that.
"""
# parameters are exchanged where torch keeps them, past the checks of nn.Module (torch 2.13)
# pyright: reportPrivateUsage=false

import contextlib
import hashlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.core.compute_leaf import bind_compute_leaves
from d9d.core.dist_ops import all_gather_object
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
    module: nn.Module,
    device: torch.device,
    seed: int,
    *,
    group: dist.ProcessGroup | None = None,
    seed_names: Mapping[str, str] | None = None,
    loaded: Collection[str] = (),
) -> None:
    """Allocate the local shard of every parameter and buffer and initialise it by ``reset_parameters``.

    Every module with a ``reset_parameters`` method that the root's method calls, directly or not, is initialised by it.
    Values depend on the seed, the module's name and its code alone, not on the mesh. Nothing is initialised where a model
    state brings all that needs values.

    Args:
        module: Root of a model that is already parallelised, in part or whole on the meta device.
        device: Where the shards go.
        seed: Seed of the values, the same on all ranks.
        group: Ranks that build their modules at the same time and must fail together; all of them must call this.
        seed_names: Names to seed some modules from instead of their own, by their own.
        loaded: Parameters and buffers that are loaded afterwards, whatever they hold until then.

    Raises:
        TypeError: If the root has no ``reset_parameters``, and something needs it, with the names of all of that.
        RuntimeError: If a parameter or buffer was left untouched, with the names of all of them.
    """
    has_reset = _has_reset(module)
    remaining = {name: tensor for name, tensor in _named_tensors(module) if name not in loaded}
    without_values = [name for name, tensor in remaining.items() if tensor.is_meta]
    # Parameters that the constructor has filled may differ between ranks; buffers that it has filled are tables.
    to_reset = [name for name, tensor in remaining.items() if tensor.is_meta or isinstance(tensor, nn.Parameter)]
    _allocate(module, device)
    bind_compute_leaves(module)
    untouched: list[str] = []
    if has_reset and (to_reset or not loaded):
        tensors = dict(_named_tensors(module))
        poisoned = {name: _Poisoned(local_tensor(tensors[name])) for name in without_values}
        _reset(module, device, seed, seed_names or {})
        untouched = [
            name
            for name, tensor in _named_tensors(module)
            if name in poisoned and poisoned[name].is_in(local_tensor(tensor))
        ]
    # Also where there was nothing to do: other stages of a pipeline may have failed.
    _raise_together(module, [] if has_reset else to_reset, untouched, group)


def _has_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))  # introspection: torch's own convention


def _reset(module: nn.Module, device: torch.device, seed: int, seed_names: Mapping[str, str]) -> None:
    """Call ``reset_parameters`` of the root, so that its work depends on neither the mesh nor the caller."""
    with contextlib.ExitStack() as stack:
        # The random state of the caller is none of our business.
        stack.enter_context(torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]))
        stack.enter_context(_FullRandom())
        for name, child in module.named_modules():
            stack.enter_context(_initialise_by_name(child, seed_names.get(name, name), seed))
        module.reset_parameters()  # pyright: ignore[reportCallIssue]  # there is one


def seed_names_of_stages(
    modules: Sequence[nn.Module], stages: Sequence[int], group: dist.ProcessGroup
) -> list[dict[str, str]]:
    """Find the modules whose names other stages of the pipeline have too. See [Note: stages that use the same names].

    Args:
        modules: Stages of this rank.
        stages: Their indices in the pipeline.
        group: Ranks of the pipeline; all must call this.

    Returns:
        The `seed_names` of each stage, for `materialize_module`.
    """
    own = {stage: [name for name, _ in module.named_modules()] for stage, module in zip(stages, modules, strict=True)}
    by_rank: list[dict[int, list[str]]] = all_gather_object(own, group)
    everywhere = {stage: names for rank_stages in by_rank for stage, names in rank_stages.items()}
    first_stage: dict[str, int] = {}
    for stage in sorted(everywhere):
        for name in everywhere[stage]:
            first_stage.setdefault(name, stage)
    return [{name: f"stage {stage}: {name}" for name in own[stage] if first_stage[name] != stage} for stage in stages]


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory, and move the others: a table that the constructor computed keeps its values."""
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((owner, name))
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    # Where torch has made new parameters, tied ones have come apart.
    for (first, first_name), *others in slots.values():
        for owner, name in others:
            owner._parameters[name] = first._parameters[first_name]


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
    if not _has_reset(module):
        yield
        return
    reset: Callable[[], None] = module.reset_parameters  # pyright: ignore[reportAssignmentType]  # there is one

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
    """Replace the distributed parameters of one module, not of its children, by full ones, and keep their parts."""
    distributed = {name: parameter for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)}
    leaves = {name: vars(module).pop(name) for name in distributed if name in vars(module)}
    for name, parameter in distributed.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=local_tensor(parameter).device)
        module._parameters[name] = nn.Parameter(_fill_with_poison(full), requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for name, parameter in distributed.items():
            full = module._parameters[name]
            assert full is not None  # put there above
            # A tied parameter may have got its values through another module, one with values may keep them.
            if not _is_poison(full).all():
                local_tensor(parameter).copy_(shard_of(full, parameter))
            module._parameters[name] = parameter
        vars(module).update(leaves)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def _random_devices(module: nn.Module) -> list[torch.device]:
    devices = {tensor.device for _, tensor in _named_tensors(module)}
    return [device for device in devices if device.type not in ("cpu", "meta")]


class _Poisoned:
    """A tensor filled with a value that no initialisation leaves, so that untouched elements can be found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _fill_with_poison(tensor)
        self._version = tensor._version

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Tell whether elements of the tensor, or of what has replaced it, are untouched."""
        if tensor.dtype == torch.bool:
            # A boolean has no such value. Only writes that autograd can see are noticed, which is all but `.data`.
            return tensor is self._tensor and tensor._version == self._version and tensor.numel() > 0
        return bool(_is_poison(tensor).any())


def _poison_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max - 1


def _fill_with_poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(_poison_value(tensor.dtype))


def _is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Tell for each element whether it is untouched."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.isnan()
    return tensor == _poison_value(tensor.dtype)


def _raise_together(
    module: nn.Module, without_reset: list[str], untouched: list[str], group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks if any of them found a tensor without values: a shard may be empty on some."""
    found = [(without_reset, untouched)] if group is None else all_gather_object((without_reset, untouched), group)
    model = type(module).__name__.removeprefix("FSDP")
    for_reset, left = ({name for names in kind for name in names} for kind in zip(*found, strict=True))
    if for_reset:
        raise TypeError(
            f"{model} has no reset_parameters(), and was built on the meta device, without values. Add a method that "
            f"initialises in place what no source sets: {', '.join(sorted(for_reset))}."
        )
    if left:
        raise RuntimeError(
            f"reset_parameters() of {model} left {len(left)} parameters or buffers without values, in whole or in "
            f"part: {', '.join(sorted(left))}. Initialise each of them there, in place."
        )
