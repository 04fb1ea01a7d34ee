"""Bring a LightningModule onto the ranks of a job, with one set of values."""

import os

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torchmetrics import Metric

from d9d.core.dist_context import DistributedContext
from d9d.internals.materialize import materialize_module
from d9d_lightning.parallelize import ParallelPlan, broadcast_packed, broadcast_values, parallelize_module


def set_up_module(
    module: LightningModule,
    context: DistributedContext | None,
    device: torch.device,
    plan: ParallelPlan,
    precision: Precision,
    layer_sync: LayerSync | None,
) -> None:
    """Move, equalise and distribute a module that no run has used yet. All ranks must call it.

    Values are those of rank 0, so that modules need not be seeded alike. A module that ``configure_model`` has left on
    the meta device is distributed first, and then initialised by its ``reset_parameters``; a checkpoint is loaded later.

    Args:
        module: The module as the user has built it.
        context: Ranks of the job; None on one process, where the module only moves.
        device: Device of this rank.
        plan: How to distribute it.
        precision: Converts the module.
        layer_sync: Converts batch norms, for ``sync_batchnorm``; None leaves them.
    """
    if layer_sync is not None and context is not None:
        # Over the default group, which is the data-parallel one as long as there is no other parallelism.
        layer_sync.apply(module)
    precision.convert_module(module)
    is_meta = is_on_meta(module)
    if not is_meta:
        module.to(device)
    group = None if context is None else context.data_group
    if context is not None and group is not None:
        broadcast_values([*module.parameters(), *module.buffers()], group)
        parallelize_module(module, context, plan)
    if is_meta:
        materialize_module(module, device, int(os.environ.get("PL_GLOBAL_SEED", "0")), group=group)


def is_on_meta(module: nn.Module) -> bool:
    """Tell whether any parameter has no memory yet."""
    return any(parameter.is_meta for parameter in module.parameters())


class ModelBuffers:
    """The buffers of a module, without those of its metrics, which are gathered in their own way.

    As under DDP, ranks use those of rank 0: running statistics, code books and the like have seen different data.
    """

    def __init__(self, module: nn.Module) -> None:
        """Note the places of the buffers; their tensors may be exchanged."""
        self._places = [
            (owner, name)
            for owner in module.modules()
            if not isinstance(owner, Metric)
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.numel()
        ]
        self._differ = False

    def note_step(self) -> None:
        """Note that a training step is about to change them on each rank."""
        self._differ = bool(self._places)

    def take_from_first(self, group: dist.ProcessGroup | None) -> None:
        """Overwrite the buffers with those of the first rank, if a step has changed them. All ranks must call it."""
        if self._differ and group is not None:
            self._differ = False
            broadcast_packed([owner.get_buffer(name) for owner, name in self._places], group)
