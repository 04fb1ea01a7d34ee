"""Bring a LightningModule onto the ranks of a job, with one set of values."""

import os
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.internals.broadcast import broadcast_packed
from d9d.internals.materialize import materialize_module
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan
from d9d_lightning.pipeline.cut import Pipeline, PipelineOptions, cut_module, pipeline_of
from d9d_lightning.placements.fsdp_steps import show_module_shards
from d9d_lightning.placements.module_agreement import agree_on_module
from d9d_lightning.placements.parallelize import broadcast_values, parallelize_module


def set_up_module(
    module: LightningModule,
    context: DistributedContext | None,
    device: torch.device,
    plan: ParallelPlan,
    precision: Precision,
    layer_sync: LayerSync | None,
    pipeline_options: PipelineOptions | None,
    names_to_load: Callable[[LightningModule], Collection[str]],
) -> None:
    """Cut, move, equalise and distribute a module that no run has used yet. All ranks must call it.

    Values are those of rank 0, so that modules need not be seeded alike; those of a pipeline stage are the ones of its
    first replica. A module that ``configure_model`` has left on the meta device is distributed first, and then initialised
    by its ``reset_parameters``, but for what a source sets; that and a checkpoint are loaded later.

    Args:
        module: The module as the user has built it.
        context: Ranks of the job; None on one process, where the module only moves.
        device: Device of this rank.
        plan: How to distribute it.
        precision: Converts the module.
        layer_sync: Converts batch norms, for ``sync_batchnorm``; None leaves them.
        pipeline_options: How to cut it into stages; None leaves it whole.
        names_to_load: Returns the tensors of the distributed module that a source sets later.

    Raises:
        ValueError: On all ranks, if they have different modules.
    """
    if context is not None:
        agree_on_module(module, context)
    if layer_sync is not None and context is not None:
        _sync_batch_norms(module, layer_sync, context)
    precision.convert_module(module)
    resolved = (
        None if callable(plan.parallelize) or context is None else resolve_plan(module, plan, context.mesh_params)
    )
    pipeline = None
    if pipeline_options is not None and context is not None:
        pipeline = cut_module(module, context, pipeline_options)
    is_meta = is_on_meta(module)
    if not is_meta:
        module.to(device)
    if context is not None:
        _equalise(module, pipeline, context)
        roots = None if pipeline is None else pipeline.stages
        parallelize_module(module, context, plan, resolved=resolved, roots=roots)
    if is_meta:
        group = None if context is None else context.replica_group
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        materialize_module(module, device, seed, group=group, loaded=names_to_load(module))


def equalise_module(module: nn.Module, context: DistributedContext | None, device: torch.device) -> None:
    """Bring what is new in a module of an earlier run onto the ranks too. All ranks must call it.

    Since then the user may have exchanged layers or changed values, on each rank in another way. Plain parameters and
    buffers move to the device, and get the values that `set_up_module` would give them. Distributed ones stay.

    Args:
        module: The module, distributed over these ranks.
        context: Ranks of the job; None does nothing.
        device: Device of this rank.
    """
    if context is None:
        return
    # A run that failed may have left gathered something else on each rank.
    show_module_shards(module)
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
    if pipeline_of(module) is None:
        agree_on_module(module, context)
    _equalise(module, pipeline_of(module), context)


def _equalise(module: nn.Module, pipeline: Pipeline | None, context: DistributedContext) -> None:
    if pipeline is None:
        broadcast_values([*module.parameters(), *module.buffers()], context.groups[0])
    else:
        _equalise_stages(module, pipeline, context)


def _equalise_stages(module: nn.Module, pipeline: Pipeline, context: DistributedContext) -> None:
    """Give equal values to the replicas of each stage, and to what is outside of the stages on all ranks."""
    inside = [tensor for stage in pipeline.stages for tensor in (*stage.parameters(), *stage.buffers())]
    own = {id(tensor) for tensor in inside}
    outside = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in own]
    broadcast_values(outside, context.groups[0])
    for group in (context.replica_group, context.mesh_for(DENSE_DOMAIN).get_group("tp")):
        if group is not None:
            broadcast_values(inside, group)


def _sync_batch_norms(module: LightningModule, layer_sync: LayerSync, context: DistributedContext) -> None:
    """Let batch norms see the batches of all data-parallel ranks, and each of them once."""
    if isinstance(layer_sync, TorchSyncBatchNorm) and context.mesh_params.data_ranks < context.world_size:
        # Lightning's own call takes all ranks, and so do layers without a group.
        nn.SyncBatchNorm.convert_sync_batchnorm(module, context.replica_group)
    else:
        layer_sync.apply(module)


def is_on_meta(module: nn.Module | None) -> bool:
    """Tell whether any parameter has no memory yet."""
    return module is not None and any(parameter.is_meta for parameter in module.parameters())


class ModelBuffers:
    """The buffers of a module, without those of its metrics, which are gathered in their own way.

    As under DDP, ranks use those of rank 0: running statistics, code books and the like have seen different data.
    """

    def __init__(self, module: nn.Module, *, differ: bool = False) -> None:
        """Note the places of the buffers; their tensors may be exchanged.

        Args:
            module: Has the buffers.
            differ: Whether ranks may have different ones now.
        """
        self._places = [
            (owner, name)
            for owner in module.modules()
            if not isinstance(owner, Metric)
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.numel()
        ]
        self._differ = differ and bool(self._places)

    def note_step(self) -> None:
        """Note that a training step is about to change them on each rank."""
        self._differ = bool(self._places)

    def take_from_first(self, group: dist.ProcessGroup | None) -> None:
        """Overwrite the buffers with those of the first rank, if a step has changed them. All ranks must call it."""
        if self._differ and group is not None:
            self._differ = False
            broadcast_packed([owner.get_buffer(name) for owner, name in self._places], group)
