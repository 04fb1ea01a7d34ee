"""torchmetrics under a mesh: states are gathered over the ranks that hold different data, and over no others."""

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from d9d.core.dist_ops import all_gather, all_gather_variadic_shape
from d9d_lightning.launch import active_data_group

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""Types of metric states, in the order of the codes that ranks exchange."""


def install_metric_sync(module: nn.Module) -> None:
    """Let every metric below a module gather over the data-parallel group, unless it says how itself.

    Not by ``process_group``: a metric that holds one cannot be cloned, copied or pickled.
    """
    for child in module.modules():
        if isinstance(child, Metric) and child.dist_sync_fn is None and child.process_group is None:
            child.dist_sync_fn = gather_metric_state


def gather_metric_state(state: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the state of each data-parallel rank, in rank order. All of them must call it.

    Sizes and numbers of dimensions may differ. A rank that has seen no data contributes an empty state, which takes
    type and dimensions of the others.

    Args:
        state: State of this rank, which keeps its place in the autograd graph.
        group: Overrides the data-parallel group of the running Trainer.
    """
    group = group or active_data_group() or dist.group.WORLD
    if group is None:
        return [state]
    own = torch.tensor([state.numel(), _DTYPES.index(state.dtype)], device=state.device)
    headers = torch.stack(all_gather(own, group)).tolist()
    filled = [rank for rank, (numel, _) in enumerate(headers) if numel]
    if not filled:
        return [state] * len(headers)
    dtype = _DTYPES[headers[filled[0]][1]]
    states = all_gather_variadic_shape(state if state.numel() else state.to(dtype), group)
    reference = states[filled[0]]
    for rank, gathered in enumerate(states):
        if not gathered.numel() and gathered.ndim != reference.ndim:
            states[rank] = reference.new_empty((0, *reference.shape[1:]))
    if state.numel():
        states[group.rank()] = state
    return states
