"""Schedules by config, without pipeline parallelism."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.pipelining.api import PipelineStageInfo
from d9d.pipelining.factory import AnyPipelineScheduleConfig, PipelineScheduleGPipeConfig, build_schedule

CONFIG = TypeAdapter(AnyPipelineScheduleConfig)

ALL_SCHEDULES = [
    {"schedule": "inference"},
    {"schedule": "gpipe"},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: torch.Tensor, shared: None) -> torch.Tensor:
        return inputs * self.weight


@pytest.mark.parametrize("values", ALL_SCHEDULES, ids=lambda values: values["schedule"])
def test_one_rank_hosts_the_whole_model(values):
    stages: list[PipelineStageInfo] = []

    def provide(stage: PipelineStageInfo) -> nn.Module:
        stages.append(stage)
        return Identity()

    info, modules = build_schedule(DeviceMeshParameters().build(), CONFIG.validate_python(values), provide)
    info.schedule.step((torch.tensor(3.0),), (None,), lambda output, _: output)

    assert stages == [PipelineStageInfo(current_stage=0, num_stages=1)]
    assert (info.has_first_stage, info.has_last_stage) == (True, True)
    (model,) = modules
    has_gradient = model.weight.grad is not None
    assert has_gradient == (values["schedule"] != "inference")


@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "looped_bfs", "num_stages_per_rank": 0},
        {"schedule": "1f1b", "num_stages_per_rank": -1, "zero_bubble": False},
        {"schedule": "1f1b", "num_stages_per_rank": 1},
        {"schedule": "gpipe", "num_stages_per_rank": 1},
        {"schedule": "round_robin"},
    ],
)
def test_a_wrong_config_is_refused(values):
    with pytest.raises(ValidationError):
        CONFIG.validate_python(values)


@pytest.mark.world_size(2)
def test_several_pipeline_ranks_are_refused():
    dist_context = DeviceMeshParameters(pipeline_parallel=2).build()
    with pytest.raises(NotImplementedError, match=r"mesh\.pipeline_parallel \(2\)"):
        build_schedule(dist_context, PipelineScheduleGPipeConfig(), lambda stage: Identity())
