"""Which pipeline rank hosts which stage. Plain data, without torch."""

from collections.abc import Mapping
from enum import StrEnum
from typing import assert_never

__all__ = ["ScheduleStyle", "build_stage_to_host_rank_topology", "invert_stage_to_host_rank_topology"]


class ScheduleStyle(StrEnum):
    """How stages are laid over ranks that host several of them."""

    loop = "loop"
    """Round and round: after the last rank comes the first one again."""
    v = "v"
    """Back and forth: every second run over the ranks goes down, so that neighbours at a turn share a rank."""


def build_stage_to_host_rank_topology(pp_size: int, num_stages: int, style: ScheduleStyle) -> dict[int, int]:
    """Find the rank that hosts each stage.

    Args:
        pp_size: Number of pipeline ranks.
        num_stages: Number of stages over all ranks.
        style: How to lay them.

    Returns:
        Rank of each stage.

    Raises:
        ValueError: If the ranks cannot host the same number of stages each.
    """
    if pp_size < 1 or num_stages < 1 or num_stages % pp_size:
        raise ValueError(f"num_stages ({num_stages}) must be a positive multiple of pp_size ({pp_size}).")
    match style:
        case ScheduleStyle.loop:
            return {stage: stage % pp_size for stage in range(num_stages)}
        case ScheduleStyle.v:
            runs = ((stage, *divmod(stage, pp_size)) for stage in range(num_stages))
            return {stage: pp_size - 1 - place if run % 2 else place for stage, run, place in runs}
        case _:
            assert_never(style)


def invert_stage_to_host_rank_topology(stage_to_host: Mapping[int, int]) -> dict[int, list[int]]:
    """List the stages of each rank, in ascending order."""
    stages: dict[int, list[int]] = {rank: [] for rank in sorted(set(stage_to_host.values()))}
    for stage in sorted(stage_to_host):
        stages[stage_to_host[stage]].append(stage)
    return stages
