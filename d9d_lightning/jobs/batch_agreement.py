"""Find out early that ranks which must read the same samples do not."""

import zlib

import torch
from lightning.pytorch.trainer.states import RunningStage

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.core.pytree import tree_leaves

_SHARED_DIMS = ("tp", "pp")
"""Mesh dimensions whose ranks work on one batch."""


class BatchAgreement:
    """Compares the first batch of each kind of loop over the ranks that work on it together.

    A sampler that goes by the global rank gives each of them other samples. Shapes fit, and what comes out is neither's
    result.
    """

    def __init__(self, context: DistributedContext) -> None:
        """Take the ranks of the job."""
        mesh = context.mesh_for(DENSE_DOMAIN)
        self._groups = [mesh.get_group(dim) for dim in _SHARED_DIMS if mesh[dim].size() > 1]
        self._stages: set[RunningStage] = set()

    def check(self, batch: object, stage: RunningStage) -> None:
        """Compare a batch if it is the first of a stage. Peers must call it for each batch; the first blocks the host.

        Args:
            batch: As the loader gives it.
            stage: Training, validation and the like.

        Raises:
            RuntimeError: On all peers, if their batches differ.
        """
        if not self._groups or stage in self._stages:
            return
        self._stages.add(stage)
        sums = [_checksum(batch)]
        for group in self._groups:
            sums = [each for part in all_gather_object(sums, group) for each in part]
        if len(set(sums)) > 1:
            raise RuntimeError(
                f"tensor-parallel and pipeline peers must read the same samples, but their first batches in "
                f"{stage.value} differ. Let Lightning insert its sampler, or build one with "
                f"trainer.distributed_sampler_kwargs instead of the global rank; a loader that shuffles by a generator "
                f"of its own needs one seed for all peers."
            )


def _checksum(batch: object) -> int:
    """Sum up the numbers and texts of a batch; other objects do not count."""
    checksum = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, str | int | float):
            content = str(leaf).encode()
        else:
            continue
        checksum = zlib.crc32(content, checksum)
    return checksum
