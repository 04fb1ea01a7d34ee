"""Distribute an unchanged LightningModule over the data-parallel ranks."""
# how modules and FSDP hold their parameters
# pyright: reportPrivateUsage=false

import weakref
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.core.fsdp_internals import fsdp_parameters, fsdp_units, gathered_parameter
from d9d.module.parallelism.plan import ParallelPlan, ResolvedPlan, resolve_plan
from d9d.module.parallelism.plan_apply import DATA_DIMS, shard_by_plan, split_by_plan
from d9d.module.parallelism.tensor import align_gradients

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


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


def mesh_of(module: nn.Module) -> DeviceMeshParameters | None:
    """Return the degrees of the mesh that an earlier run has distributed a module over; None if none has."""
    known = _DISTRIBUTED.get(module)
    return None if known is None else known.mesh_params


def parallelize_module(
    module: LightningModule,
    context: DistributedContext,
    plan: ParallelPlan,
    *,
    resolved: ResolvedPlan | None = None,
    roots: Sequence[nn.Module] | None = None,
) -> None:
    """Distribute a LightningModule by a plan, in place.

    [Note: replicated parameters stay plain]
    What is neither sharded nor split stays a plain tensor, as under DDP, and its gradients are summed over all
    data-parallel ranks. So code that computes with ``self.parameters()``, assigns gradients or data, hangs hooks on
    parameters or copies the module works as it does there. A function that calls `parallelize_replicate` itself gets
    DTensors.

    Args:
        module: On its device with the same values on all ranks, or on the meta device.
        context: Ranks of the job.
        plan: What goes where.
        resolved: What `resolve_plan` has found before the module was cut into stages. Submodules that have been
            exchanged since are left alone. None: the module is whole.
        roots: The stages of a module that was cut. Each is sharded by itself, and what is outside of them is
            replicated. None: the LightningModule is the only root.

    Raises:
        ValueError: With all that is wrong with the plan.
    """
    if callable(plan.parallelize):
        plan.parallelize(module, context)
        align_gradients(parameter for parameter in module.parameters() if parameter not in _managed_by_fsdp(module))
    else:
        resolved = resolved or resolve_plan(module, plan, context.mesh_params)
        split_by_plan(module, resolved, context)
        if roots is not None:
            _refuse_shards_outside(module, roots, resolved)
        for root in [module] if roots is None else roots:
            shard_by_plan(root, context, plan, resolved)
    if isinstance(module, FSDPModule):
        _register_steps(module)
    _keep_class_names(module)
    FlagFollower.install(module)
    _DISTRIBUTED[module] = context


def data_parallel_groups(context: DistributedContext) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the data-parallel mesh dimensions, innermost first; those of size 1 are left out."""
    mesh = context.mesh_for(DENSE_DOMAIN)[DATA_DIMS]
    return tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1)


def _refuse_shards_outside(module: nn.Module, roots: Sequence[nn.Module], resolved: ResolvedPlan) -> None:
    """Refuse to shard what all stages have: FSDP would gather it in calls that some of them leave early."""
    inside = {parameter for root in roots for parameter in root.parameters()}
    present = set(module.modules())
    problems = [
        f"{choice.pattern!r} shards {name!r}, which is outside of the pipelined module. What is outside is replicated"
        for name, choice in (resolved.placements or {}).items()
        if choice.value != "replicate" and choice.module in present
        if (parameters := set(choice.module.parameters())) and not parameters & inside
    ]
    if problems:
        raise ValueError(f"parallelize: {'. '.join(problems)}.")


def _managed_by_fsdp(module: nn.Module) -> set[nn.Parameter]:
    return {parameter.sharded_param for unit in fsdp_units(module) for parameter in fsdp_parameters(unit)}


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
