"""Distribute an unchanged LightningModule over the data-parallel ranks."""
# how modules and FSDP hold their parameters
# pyright: reportPrivateUsage=false

import dataclasses
import difflib
import fnmatch
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.fsdp_internals import fsdp_parameters, gathered_parameter
from d9d.module.parallelism.api import parallelize_hsdp
from d9d.module.parallelism.units import repeated_blocks, wrap_by_size

Placement = Literal["replicate", "shard", "hsdp"]
Parallelize = Callable[[nn.Module, DistributedContext], None] | Mapping[str, Placement] | None
"""How to distribute a module: a function, placements by name pattern, or None for the default."""

_SHARD_DIM = "dp_cp_shard"
_DATA_DIMS = ("dp_replicate", _SHARD_DIM, "cp_replicate")
_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How to distribute a module, as the user has said it."""

    parallelize: Parallelize
    """See `Parallelize`."""
    min_unit_params: int
    """Smallest FSDP unit of the default plan where no block repeats, in parameters."""
    fsdp_kwargs: Mapping[str, Any]  # torch's own arguments, passed through
    """``mp_policy`` and ``reshard_after_forward`` of ``fully_shard``."""


_DISTRIBUTED: weakref.WeakKeyDictionary[nn.Module, DistributedContext] = weakref.WeakKeyDictionary()
"""Modules that have been distributed, and over what. A second Trainer run must leave them as they are."""


def is_parallelized(module: nn.Module, context: DistributedContext | None) -> bool:
    """Tell whether a module was distributed in an earlier run.

    Args:
        module: The LightningModule.
        context: Ranks of this run; None on one process.

    Raises:
        RuntimeError: If it was distributed over another mesh.
    """
    known = _DISTRIBUTED.get(module)
    if known is not context and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        # Never distributed, or replicated as it was: plain tensors may go anywhere.
        return False
    if known is not None and known is not context:
        target = "one process" if context is None else f"this one ({_describe(context)})"
        raise RuntimeError(
            f"this {type(module).__name__} was distributed over another mesh ({_describe(known)}) by an earlier "
            f"Trainer, and cannot move to {target}. Save a checkpoint there, and load it into a new instance."
        )
    return known is not None


def parallelize_module(module: LightningModule, context: DistributedContext, plan: ParallelPlan) -> None:
    """Distribute a LightningModule by a plan, in place.

    [Note: replicated parameters stay plain]
    What is not sharded stays a plain tensor, as under DDP, and its gradients are summed over all data-parallel ranks. So
    code that computes with ``self.parameters()``, assigns gradients or data, hangs hooks on parameters or copies the
    module works as it does there. A function that calls `parallelize_replicate` itself gets DTensors.

    Args:
        module: On its device with the same values on all ranks, or on the meta device.
        context: Ranks of the job.
        plan: What goes where.

    Raises:
        ValueError: If a pattern matches no submodule, or a placement is unknown.
    """
    mesh = context.mesh_for(DENSE_DOMAIN)[_DATA_DIMS]
    if plan.parallelize is None:
        _apply_default(module, mesh, plan)
    elif isinstance(plan.parallelize, Mapping):
        _apply_patterns(module, mesh, plan.parallelize, plan.fsdp_kwargs)
    else:
        plan.parallelize(module, context)
    if isinstance(module, FSDPModule):
        _register_steps(module)
    _keep_class_names(module)
    FlagFollower.install(module)
    _DISTRIBUTED[module] = context


def data_parallel_groups(context: DistributedContext) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the data-parallel mesh dimensions, innermost first; those of size 1 are left out."""
    mesh = context.mesh_for(DENSE_DOMAIN)[_DATA_DIMS]
    return tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1)


def _apply_default(module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Shard each repeated block, or each part of some size, and what is left as the root."""
    if not _has_shards(mesh):
        return
    units = repeated_blocks(module) or wrap_by_size(module, plan.min_unit_params)
    for unit in _without_shared_parameters(module, units):
        if any(True for _ in unit.parameters()):
            parallelize_hsdp(unit, mesh, _SHARD_DIM, **plan.fsdp_kwargs)
    _shard_root(module, mesh, plan.fsdp_kwargs)


def _has_shards(mesh: DeviceMesh) -> bool:
    return mesh.size(_DATA_DIMS.index(_SHARD_DIM)) > 1


def _shard_root(module: nn.Module, mesh: DeviceMesh, fsdp_kwargs: Mapping[str, Any]) -> None:
    # The code of a step may use the root's parameters after `forward` has ended, so they stay gathered until the
    # backward pass, which needs them at once anyway.
    parallelize_hsdp(module, mesh, _SHARD_DIM, **{**fsdp_kwargs, "reshard_after_forward": False})


def _without_shared_parameters(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Drop units that share a parameter with something outside: FSDP would cut the tie."""
    uses = Counter(parameter for _, parameter in _slots(module))
    return [
        unit
        for unit in units
        if all(uses[parameter] == count for parameter, count in Counter(p for _, p in _slots(unit)).items())
    ]


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield each place of each parameter, so that a shared one comes several times."""
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                yield owner, parameter


def _apply_patterns(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Placement], fsdp_kwargs: Mapping[str, Any]
) -> None:
    """Distribute the submodules that patterns name, inner ones first; the first pattern that matches a name counts."""
    names = dict(module.named_modules())
    matches = {pattern: [name for name in names if _matches(name, pattern)] for pattern in plan}
    _check_patterns(plan, matches, list(names))
    chosen: dict[str, Placement] = {}
    for pattern, matched in matches.items():
        for name in matched:
            chosen.setdefault(name, plan[pattern])
    if not _has_shards(mesh):
        return
    by_depth = sorted(chosen, key=lambda name: name.count(".") + bool(name))
    placements: dict[nn.Parameter, Placement] = {}
    for name in by_depth:
        placements.update(dict.fromkeys(names[name].parameters(), chosen[name]))
    kept = {parameter for parameter in module.parameters() if placements.get(parameter, "replicate") == "replicate"}
    kwargs = {**fsdp_kwargs, "ignored_params": kept}
    sharded = [name for name in reversed(by_depth) if chosen[name] != "replicate"]
    for name in sharded:
        parallelize_hsdp(names[name], mesh, _SHARD_DIM, **kwargs)
    if sharded and "" not in chosen:
        # FSDP wants one root above its units, which also lets them prefetch.
        _shard_root(module, mesh, kwargs)


def _matches(name: str, pattern: str) -> bool:
    """Match a dotted name part by part, so that ``blocks.*`` is each block, but nothing inside of it."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _check_patterns(plan: Mapping[str, Placement], matches: Mapping[str, list[str]], names: list[str]) -> None:
    problems: list[str] = []
    for pattern, placement in plan.items():
        if placement not in ("replicate", "shard", "hsdp"):
            problems.append(f"{pattern!r}: unknown placement {placement!r}, valid are replicate, shard and hsdp")
        if not matches[pattern]:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            hint = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
            problems.append(f"{pattern!r} matches no submodule{hint}")
    if problems:
        raise ValueError(f"parallelize: {'. '.join(problems)}.")


def _register_steps(module: FSDPModule) -> None:
    """Let the steps gather the root's parameters, since they may use layers without calling ``forward``."""
    for name in _STEP_METHODS:
        if is_overridden(name, cast("LightningModule", module)):
            register_fsdp_forward_method(cast("nn.Module", module), name)


def _keep_class_names(module: nn.Module) -> None:
    """Undo the renaming of classes by FSDP, which would show in logs and summaries."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            wrapped = type(child)
            original = wrapped.__mro__[2]
            wrapped.__name__, wrapped.__qualname__ = original.__name__, original.__qualname__
            wrapped.__module__ = original.__module__


def _describe(context: DistributedContext) -> str:
    degrees = context.mesh_params.model_dump()
    return ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


class FlagFollower:
    """Forward pre-hook that lets what a module computes with follow ``requires_grad`` while a step runs.

    Freezing callbacks and ``toggle_optimizer`` set the flag on the parameters that optimizers hold. What FSDP has
    gathered for the root, once and for the whole step, is not told.
    """

    def __init__(self, module: nn.Module, root: nn.Module) -> None:
        """Watch the parameters below a module that belong to the root."""
        parameters = set(module.parameters())
        self._gathered = [
            fsdp_parameter
            for fsdp_parameter in (fsdp_parameters(root) if isinstance(root, FSDPModule) else ())
            if fsdp_parameter.sharded_param in parameters
        ]

    @classmethod
    def install(cls, root: nn.Module) -> None:
        """Hook into the outermost submodules of a root. What is called below them follows then."""
        for child in outermost_with_forward(root):
            follower = cls(child, root)
            if follower._gathered:
                child.register_forward_pre_hook(follower)

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Follow before the module runs."""
        self.follow()

    def follow(self) -> None:
        """Set the flags that have changed."""
        for fsdp_parameter in self._gathered:
            gathered = gathered_parameter(fsdp_parameter)
            if gathered is not None and gathered.requires_grad is not fsdp_parameter.sharded_param.requires_grad:
                gathered.requires_grad_(fsdp_parameter.sharded_param.requires_grad)


def outermost_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those of its containers that have no forward pass."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from outermost_with_forward(child)
        else:
            yield child


@torch.no_grad()
def broadcast_values(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors with those of the first rank of a group. All of its ranks must call it.

    Distributed tensors and those on the meta device are left out.
    """
    pending: list[tuple[torch.Tensor, torch.Tensor, dist.Work]] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().contiguous()
        work = dist.broadcast(flat, group=group, group_src=0, async_op=True)
        assert work is not None  # this rank is a member
        pending.append((tensor, flat, work))
    for tensor, flat, work in pending:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


@torch.no_grad()
def broadcast_packed(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Do what `broadcast_values` does with one collective per dtype, for many small tensors."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():
        packed = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.broadcast(packed, group=group, group_src=0)
        parts = packed.split([tensor.numel() for tensor in members])
        for part, tensor in zip(parts, members, strict=True):
            tensor.copy_(part.view_as(tensor))
