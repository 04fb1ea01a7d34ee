"""Seeds of the random number generators of a process."""

import contextlib
import random
from collections.abc import Generator

import numpy as np
import torch

from d9d.core.device import random_state, set_random_state
from d9d.core.dist_context import BATCH_DOMAIN, REGULAR_DOMAIN, DistributedContext

__all__ = ["seeded", "set_seeds", "set_step_seeds"]

_NUM_NUMPY_SEEDS = 2**32
_NUM_TORCH_SEEDS = 2**63


def set_seeds(dist_context: DistributedContext, seed: int, distinct_seed_mesh_dim: str = "pp") -> None:
    """Seed the generators of Python, NumPy and PyTorch, those of the device included. Not collective.

    Ranks that differ only in dimensions other than `distinct_seed_mesh_dim` get the same seed. By default that makes
    pipeline stages draw different initial weights and dropout masks, while all ranks that hold the same stage agree: a
    replicated parameter is initialized the same on each of them, and tensor-parallel peers drop the same activations.

    Args:
        dist_context: Topology of the job.
        seed: Base seed.
        distinct_seed_mesh_dim: Dimension of the regular domain whose coordinate is added to the seed.

    Raises:
        ValueError: The regular domain has no such dimension.
    """
    shift = 0
    if dist_context.is_distributed:
        mesh = dist_context.mesh_for(REGULAR_DOMAIN)
        names = mesh.mesh_dim_names or ()
        if distinct_seed_mesh_dim not in names:
            raise ValueError(
                f"distinct_seed_mesh_dim ({distinct_seed_mesh_dim!r}) must be a dimension of the regular domain: "
                f"{', '.join(names)}."
            )
        shift = mesh.get_local_rank(distinct_seed_mesh_dim)
    _seed_all(seed + shift)


def set_step_seeds(dist_context: DistributedContext, seed: int) -> None:
    """Seed the same generators for the steps of a job. Not collective.

    Ranks with different data or different stages draw different dropout masks; tensor-parallel peers, which hold the
    same activations, draw the same. One process draws as the first rank of any mesh.
    """
    shift = 0
    if dist_context.is_distributed:
        mesh = dist_context.mesh_for(BATCH_DOMAIN)
        for name in ("pp", "dp", "cp"):
            shift = shift * mesh[name].size() + mesh.get_local_rank(name)
    _seed_all(seed + shift)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Run a block with generators seeded by a number, and let them go on afterwards as if it had not run.

    Args:
        seed: Seed of the generators of Python, NumPy and PyTorch.
        device: The accelerator whose generator takes part.
    """
    is_cpu = device.type == "cpu"
    # The generator's own methods take 1 microsecond where `torch.manual_seed` takes 100, as it looks for accelerators.
    torch_state = torch.default_generator.get_state() if is_cpu else random_state(device)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    if is_cpu:
        own_seed = seed % _NUM_TORCH_SEEDS
        random.seed(own_seed)
        np.random.seed(own_seed % _NUM_NUMPY_SEEDS)
        torch.default_generator.manual_seed(own_seed)
    else:
        _seed_all(seed)
    try:
        yield
    finally:
        if isinstance(torch_state, torch.Tensor):
            torch.default_generator.set_state(torch_state)
        else:
            set_random_state(device, torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _seed_all(seed: int) -> None:
    own_seed = seed % _NUM_TORCH_SEEDS
    random.seed(own_seed)
    np.random.seed(own_seed % _NUM_NUMPY_SEEDS)
    torch.manual_seed(own_seed)
