"""Re-exports what programs are made with."""

from d9d.pipelining.communications import add_communication_ops
from d9d.pipelining.placement import (
    ScheduleStyle,
    build_stage_to_host_rank_topology,
    invert_stage_to_host_rank_topology,
)
from d9d.pipelining.programs import PipelineProgramBuilder

__all__ = [
    "PipelineProgramBuilder",
    "ScheduleStyle",
    "add_communication_ops",
    "build_stage_to_host_rank_topology",
    "invert_stage_to_host_rank_topology",
]
