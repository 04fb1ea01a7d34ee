"""Find what of a model is to be filled, and what keeps it from being filled."""

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from d9d.core.placement import local_tensor
from d9d.model_state.io.boxes import local_boxes
from d9d.model_state.mapper.names import NearestNames, listed

__all__ = ["Kept", "Target", "find_targets"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A parameter or buffer to be filled.

    Attributes:
        names: All its names in ``state_dict()``.
        tensor: The parameter or buffer itself.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What of a model stays as it is.

    Attributes:
        patterns: As of `fnmatch`, of names.
        option: The setting that has them, for messages.
    """

    patterns: Sequence[str] = ()
    option: str = "keep"


def find_targets(model: nn.Module, keep: Kept, problems: list[str]) -> tuple[dict[str, Target], frozenset[str]]:
    """Return the parameters and persistent buffers by name, where tied names have one target, and the names to keep.

    Args:
        model: The model, on its device.
        keep: What stays as it is.
        problems: Where everything that cannot be filled is reported, one sentence each.
    """
    # Hooks of FSDP run here, after which the parameters are the sharded ones.
    state: dict[str, object] = model.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    kept = _find_kept(keep, tensors.keys() | parameters.keys() | buffers.keys(), problems)
    names_by_memory: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names_by_memory.setdefault(_memory_of(tensor), []).append(name)
    hidden, not_persistent = (
        {name: own for name, own in named.items() if name not in tensors and _memory_of(own) not in names_by_memory}
        for named in (parameters, buffers)
    )
    problems.extend(_unallocated(tensors, not_persistent))
    owned = {id(tensor) for tensor in (*parameters.values(), *buffers.values())}
    problems.extend(_unfillable({name: own for name, own in tensors.items() if name not in kept}, owned, keep.option))
    if left := hidden.keys() - kept:
        problems.append(
            f"{len(left)} parameters of the model are not in its state_dict(), so that they cannot be filled: {listed(left)}. "
            f"Name them in `{keep.option}` if they shall stay as they are, or load before what hides them is added."
        )
    problems.extend(_overlaps(tensors, kept))
    targets: dict[str, Target] = {}
    for names in names_by_memory.values():
        targets.update(dict.fromkeys(names, Target(tuple(sorted(names)), tensors[names[0]])))
    return targets, kept


def _find_kept(keep: Kept, names: Collection[str], problems: list[str]) -> frozenset[str]:
    kept = frozenset(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in keep.patterns))
    unused = [pattern for pattern in keep.patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in kept)]
    if unused:
        problems.append(f"`{keep.option}` matches nothing of the model by {NearestNames(names).described(unused)}.")
    return kept


def _unallocated(tensors: Mapping[str, torch.Tensor], not_persistent: Mapping[str, torch.Tensor]) -> list[str]:
    """Report what has no memory, also of what is not filled: nobody would give it some later."""
    names = [name for named in (tensors, not_persistent) for name, own in named.items() if local_tensor(own).is_meta]
    if not names:
        return []
    hint = "Materialize the model first, as by model.to_empty(device=...)"
    if not_persistent:
        # Memory alone would leave them with whatever lay there, which nothing overwrites.
        hint += (
            f", and then compute the buffers that no model state holds, as reset_parameters() of the modules that own them "
            f"does: {listed(not_persistent)}"
        )
    return [
        f"{len(names)} parameters or buffers of the model are on the meta device, without memory: {listed(names)}. {hint}."
    ]


def _unfillable(tensors: Mapping[str, torch.Tensor], owned: Collection[int], keep_option: str) -> list[str]:
    """Report tensors of ``state_dict()`` that nothing can be written to."""
    problems: list[str] = []
    computed = [name for name, tensor in tensors.items() if id(tensor) not in owned]
    repeated = [name for name, tensor in tensors.items() if _repeats_itself(local_tensor(tensor))]
    if computed:
        problems.append(
            f"state_dict() of the model computes {listed(computed)} instead of giving its parameters and buffers, so "
            f"that they cannot be filled; name them in `{keep_option}`, or load before what computes them is added."
        )
    if repeated:
        problems.append(
            f"Elements of {listed(repeated)} share memory with one another, as after expand(), so that they cannot be "
            f"set one by one. Register a clone() of the tensor, or name it in `{keep_option}`."
        )
    cut_otherwise: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        try:
            local_boxes(tensor)
        except NotImplementedError as error:
            cut_otherwise.setdefault(str(error), []).append(name)
    problems.extend(f"{listed(names)} cannot be filled: {reason}" for reason, names in cut_otherwise.items())
    return problems


def _memory_of(tensor: torch.Tensor) -> object:
    """Return what tied tensors have in common: they are one object, or at least one piece of memory."""
    local = local_tensor(tensor)
    if local.is_meta or local.numel() == 0:
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def _repeats_itself(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _overlaps(tensors: Mapping[str, torch.Tensor], kept: Collection[str]) -> list[str]:
    """Report tensors that have bytes in common and are not tied: filling one would change another."""
    views: dict[object, dict[object, str]] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if not local.is_meta and local.numel() > 0:
            storage = local.device, local.untyped_storage().data_ptr()
            views.setdefault(storage, {}).setdefault(_memory_of(tensor), name)
    problems: list[str] = []
    for of_storage in views.values():
        open_names: list[str] = []
        for name in sorted(of_storage.values(), key=lambda name: local_tensor(tensors[name]).data_ptr()):
            local = local_tensor(tensors[name])
            open_names = [other for other in open_names if _end_of(local_tensor(tensors[other])) > local.data_ptr()]
            problems.extend(
                f"{listed([name, other])} overlap in memory and are not the same view of it, so that filling one changes the "
                f"other. Register a clone() of one of them."
                for other in open_names
                if name not in kept or other not in kept
                if _share_bytes(local, local_tensor(tensors[other]))
            )
            open_names.append(name)
    return problems


def _end_of(tensor: torch.Tensor) -> int:
    """Return the address behind the last element of a tensor that has some."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two views of one storage have bytes in common; ranges alone do not tell, as for columns side by side."""
    start = min(first.data_ptr(), second.data_ptr())
    marks = torch.zeros(max(_end_of(first), _end_of(second)) - start, dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        # Repeated elements are marked once.
        sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return marks.as_strided([*sizes, tensor.itemsize], [*strides, 1], tensor.data_ptr() - start)

    bytes_of(first).fill_(True)
    return bool(bytes_of(second).any())
