"""Balance the loads of experts without a loss, by the biases of their routers."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .layer import MoELayer


@torch.no_grad()
def update_expert_biases(modules: Iterable[nn.Module], rate: float, group: dist.ProcessGroup | None) -> None:
    """Move the biases of all routers against the loads since the last call, and start to count anew.

    Call it once per optimizer step, when all of its microbatches have gone forward: in the native loop on
    ``EVENT_TRAIN_OPTIMIZER_STEP_POST``, under Lightning in ``on_train_batch_end`` of a completed step. Loads of a validation
    count as well, unless `MoELayer.reset_stats` is called behind it. All ranks of the group must call it, with layers in the
    same order. One collective for all layers; the host does not wait for it.

    Args:
        modules: Modules with `MoELayer` anywhere below, such as the stages of this rank. Those without bias are left alone.
        rate: Size of the step; 0.001 in the paper.
        group: The ranks with other data and the same layers: ``DistributedContext.replica_group``. None for one process.

    Source: "Auxiliary-Loss-Free Load Balancing", https://arxiv.org/abs/2408.15664, algorithm 1.
    """
    found = {layer: None for module in modules for layer in module.modules() if isinstance(layer, MoELayer)}
    layers = [layer for layer in found if layer.router.expert_bias is not None]
    if not layers:
        return
    counts = torch.cat([layer.tokens_per_expert for layer in layers])
    if group is not None:
        dist.all_reduce(counts, group=group)
    for layer, of_layer in zip(layers, counts.split([layer.num_experts for layer in layers]), strict=True):
        layer.router.update_expert_bias(of_layer, rate)
        layer.reset_stats()
