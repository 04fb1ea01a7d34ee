"""Tensor parallelism under Lightning: which layers are split, and what peers must have in common."""
# how modules hold their parameters
# pyright: reportPrivateUsage=false

import random

import numpy as np
import torch.distributed as dist

from d9d.core.device import random_state, set_random_state
from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext


def share_random_state(context: DistributedContext) -> None:
    """Let tensor-parallel and pipeline peers go on with the random numbers of the first of them. All ranks must call it.

    They work on one batch, so they must read the same samples in the same order and augment them alike; tensor-parallel
    peers must also drop the same elements, while stages draw numbers of their own. This takes the generators of Python,
    NumPy and PyTorch, that of the device included. Without such peers it does nothing. It blocks the host.
    """
    mesh, device = context.mesh_for(DENSE_DOMAIN), context.current_device
    for dim in ("pp", "tp"):
        if mesh[dim].size() == 1:
            continue
        states = [(random.getstate(), np.random.get_state(), random_state(device))]
        dist.broadcast_object_list(states, group=mesh.get_group(dim), group_src=0)
        python_state, numpy_state, torch_states = states[0]
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_random_state(device, torch_states)
