"""What the ranks of a pipeline compare before they exchange a pack, while nobody waits for what never comes."""

import contextlib
import logging
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import local_tensor
from d9d.core.pytree import tree_leaves
from d9d.pipelining.api import StageBoundary
from d9d.pipelining.stage import PipelineStage

__all__ = ["agree_on_pack"]

_Transfers: TypeAlias = dict[tuple[int, StageBoundary], list[str]]
"""What is exchanged for each microbatch, by stage and boundary."""


class _Pack(NamedTuple):
    """A pack as one rank sees it."""

    num_microbatches: int
    transfers: _Transfers
    checksums: list[int]
    """Of the pipeline inputs and shared data of each microbatch."""


# `Any`: inputs are the job's own types.
def agree_on_pack(
    stages: Sequence[PipelineStage[Any, Any, Any, Any]],
    inputs: Sequence[Any],
    shared: Sequence[Any],
    group: dist.ProcessGroup,
    logger: logging.Logger,
) -> None:
    """Refuse packs that do not fit together, on all ranks. All ranks of the pipeline must call it; blocks the host.

    Inputs that differ are only warned of: a job may leave out on some ranks what no stage there reads.

    Args:
        stages: Stages of this rank.
        inputs: Pipeline input of each microbatch.
        shared: Shared data of each microbatch.
        group: Ranks of the pipeline.
        logger: Gets the warning on the first rank of the pipeline.

    Raises:
        ValueError: The numbers of microbatches differ, or what two stages say of the boundary between them.
    """
    transfers: _Transfers = {}
    checksums: list[int] = []
    # What fails here fails again in the step, where it is reported with its action.
    with contextlib.suppress(Exception):
        for stage in stages:
            for boundary, texts in stage.describe_transfers(inputs).items():
                transfers[stage.info.current_stage, boundary] = texts
        checksums = [_checksum(pair) for pair in zip(inputs, shared, strict=True)]
    packs: list[_Pack] = all_gather_object(_Pack(len(inputs), transfers, checksums), group)
    by_rank = [pack.num_microbatches for pack in packs]
    if len(set(by_rank)) > 1:
        raise ValueError(
            f"the ranks of a pipeline have packs of different sizes: {by_rank} microbatches by pipeline rank. Each "
            f"must read the same data: a data provider may look at dp_rank, but not at the global rank."
        )
    _refuse_different_transfers({key: texts for pack in packs for key, texts in pack.transfers.items()})
    # A rank that has failed has none, and says so in the step.
    if len({tuple(pack.checksums) for pack in packs if pack.checksums}) > 1 and group.rank() == 0:
        logger.warning(
            "the ranks of a pipeline have different inputs or shared data in the first pack. If they read different "
            "samples, or change them at random each in its own way, losses are computed on targets that belong to other "
            "inputs. Let a data provider look at dp_rank alone, and draw random numbers where data is read."
        )


def _refuse_different_transfers(transfers: _Transfers) -> None:
    for (stage, boundary), sent in sorted(transfers.items(), key=lambda item: item[0][0]):
        expected = transfers.get((stage + 1, StageBoundary.incoming), sent)
        if boundary is StageBoundary.incoming or sent == expected:
            continue
        microbatch = next(index for index, pair in enumerate(zip(sent, expected, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"stage {stage} sends something else than stage {stage + 1} expects for microbatch {microbatch}, by their "
            f"stage_transfer_spec().\n"
            f"  stage {stage}, StageBoundary.outgoing: {sent[microbatch]}\n"
            f"  stage {stage + 1}, StageBoundary.incoming: {expected[microbatch]}\n"
            f"Both must give the same, and pipeline_input must be the same on all ranks of a pipeline."
        )


def _checksum(tree: object) -> int:
    """Return a number that equal tensors have in common; other leaves do not count."""
    checksum = 0
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            content = local_tensor(leaf.detach()).cpu().contiguous().flatten().view(torch.uint8)
            checksum = zlib.crc32(content.numpy().tobytes(), checksum)
    return checksum
