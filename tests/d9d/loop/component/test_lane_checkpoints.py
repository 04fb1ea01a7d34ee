"""Streams whose lanes have a state, through checkpoints: saved by several ranks, resumed by others."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d.checkpoint import CheckpointFolder, CheckpointSaver, Document, load_state
from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.participants import Participants
from d9d.dataset.lanes import BatchSchedule, DataPlan, ElasticLaneStream, LaneRecords, WrapPacker
from d9d.loop.component.data_stream import DataParallelMicrobatchPackStream

PLAN = DataPlan(
    num_samples=9, schedule=BatchSchedule.constant(16), microbatch_size=2, num_epochs=None, num_lanes=4, seed=3
)


class Texts:
    """Document i holds i + 1 times the token i: lanes stop in the middle of documents."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index)


def stream(context: DistributedContext) -> DataParallelMicrobatchPackStream:
    inner = ElasticLaneStream(
        lambda lane: WrapPacker(LaneRecords(Texts(), PLAN, lane), 6),
        lambda sequences: [sequence.tokens.tolist() for sequence in sequences],
        PLAN,
        dp_size=context.dp_size,
        dp_rank=context.dp_rank,
        total_steps=6,
    )
    return DataParallelMicrobatchPackStream(context, inner)


def as_documents(state: dict[str, Any]) -> dict[str, Any]:
    return {key: Document(value) for key, value in state.items()}


def of_all_ranks(packs: list[Any]) -> list[list[Any]]:
    """Microbatches of each step over the data-parallel ranks; tensor-parallel peers read the same ones."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, packs)
    seen: list[list[Any]] = [[] for _ in packs]
    for index, of_rank in enumerate(gathered):
        if of_rank not in gathered[:index]:
            for step, pack in enumerate(of_rank):
                seen[step].extend(pack)
    return seen


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "degrees", [{"data_parallel_shard": 4}, {"data_parallel_shard": 2, "tensor_parallel": 2}, {"tensor_parallel": 4}]
)
def test_lanes_go_to_whoever_has_them_now(tmp_path: Path, degrees: dict[str, int]):
    saved = stream(DeviceMeshParameters(data_parallel_replicate=2, tensor_parallel=2).build())
    packs = iter(saved)
    for _ in range(2):
        next(packs)
    world = dist.group.WORLD
    folder = CheckpointFolder(tmp_path, logging.getLogger("test"))
    CheckpointSaver(folder, Participants([world])).save(as_documents(saved.state_dict()), 2)
    rest = of_all_ranks(list(packs))

    resumed = stream(DeviceMeshParameters(**degrees).build())
    loaded = load_state(tmp_path / "save-2", as_documents(resumed.state_dict()), world)
    resumed.load_state_dict(loaded)
    assert of_all_ranks(list(resumed)) == rest
    assert len(rest) == 4
