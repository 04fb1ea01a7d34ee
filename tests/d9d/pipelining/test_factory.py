"""Schedules by config: which stages each rank hosts, and what is refused."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.pipelining.actions import ActionBase
from d9d.pipelining.api import PipelineStageInfo, StageBoundary, TensorSpec
from d9d.pipelining.factory import (
    AnyPipelineScheduleConfig,
    build_forward_schedule,
    build_program_builder_from,
    build_schedule,
    stages_of_rank,
)

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

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> TensorSpec:
        return TensorSpec(tuple(pipeline_input.shape), pipeline_input.dtype)


@pytest.mark.world_size(2)
def test_a_stage_that_cannot_be_cut_is_refused():
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    with pytest.raises(TypeError, match=r"Linear has no stage_transfer_spec\(pipeline_input, boundary\)"):
        build_schedule(context, CONFIG.validate_python({"schedule": "gpipe"}), lambda stage: nn.Linear(1, 1))


@pytest.mark.parametrize("values", ALL_SCHEDULES, ids=lambda values: values["schedule"])
def test_one_rank_hosts_the_whole_model(values: dict[str, Any]):
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
        {"schedule": "looped_bfs"},
        {"schedule": "gpipe", "num_stages_per_rank": 1},
        {"schedule": "round_robin"},
        {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": False, "lookahead": -1},
        {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": False, "lookahead": 1},
        {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": True, "lookahead": 1},
    ],
)
def test_a_wrong_config_is_refused(values: dict[str, Any]):
    with pytest.raises(ValidationError):
        CONFIG.validate_python(values)


LOOP_OF_2 = {0: [0, 2], 1: [1, 3]}
V_OF_2 = {0: [0, 3], 1: [1, 2]}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("values", "stages"),
    [
        ({"schedule": "inference"}, {0: [0], 1: [1]}),
        ({"schedule": "gpipe"}, {0: [0], 1: [1]}),
        ({"schedule": "looped_bfs", "num_stages_per_rank": 2}, LOOP_OF_2),
        ({"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": True}, {0: [0], 1: [1]}),
        ({"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": False}, LOOP_OF_2),
        ({"schedule": "zero_bubble_v"}, V_OF_2),
        ({"schedule": "dual_pipe_v"}, V_OF_2),
    ],
    ids=str,
)
def test_a_rank_builds_its_own_stages_only_and_in_order(values: dict[str, Any], stages: dict[int, list[int]]):
    built: list[PipelineStageInfo] = []
    modules_by_stage: dict[int, nn.Module] = {}

    def provide(stage: PipelineStageInfo) -> nn.Module:
        built.append(stage)
        modules_by_stage[stage.current_stage] = Identity()
        return modules_by_stage[stage.current_stage]

    context = DeviceMeshParameters(pipeline_parallel=2).build()
    info, modules = build_schedule(context, CONFIG.validate_python(values), provide)
    own = stages[dist.get_rank()]
    num_stages = len(stages[0]) + len(stages[1])
    assert built == [PipelineStageInfo(current_stage=index, num_stages=num_stages) for index in own]
    assert modules == [modules_by_stage[index] for index in own]
    assert (info.has_first_stage, info.has_last_stage) == (0 in own, num_stages - 1 in own)


def test_lookahead_lets_a_rank_run_ahead():
    classic = {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": False, "lookahead": 0}
    # A gradient comes back after a forward pass on each rank from here on. By default all but the last do one more.
    assert num_forwards_ahead(classic) == [4, 3, 2, 1]
    assert num_forwards_ahead(classic | {"lookahead": None}) == [5, 4, 3, 1]


def num_forwards_ahead(values: dict[str, Any]) -> list[int]:
    """Return how many forward passes each rank does before its first backward pass."""
    builder = build_program_builder_from(CONFIG.validate_python(values))
    return [
        next(index for index, text in enumerate(passes(program)) if "B" in text)
        for program in builder.compose(8, 4).values()
    ]


def passes(program: Iterable[ActionBase]) -> list[str]:
    return [text for text in map(str, program) if "SEND" not in text and "RECV" not in text]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("values", ALL_SCHEDULES[1:], ids=lambda values: values["schedule"])
def test_stages_run_forward_alone_before_and_after_they_train(values: dict[str, Any]):
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    config = CONFIG.validate_python(values)
    info, modules = build_schedule(context, config, lambda stage: Identity())
    assert [stage.current_stage for stage in stages_of_rank(context, config)] == list(
        info.stages_by_rank[dist.get_rank()]
    )
    forward = build_forward_schedule(context, config, modules)
    inputs = (torch.tensor([2.0]), torch.tensor([3.0]))
    for _ in range(2):
        outputs: list[float] = []
        forward.step(inputs, (None, None), lambda output, _, outputs=outputs: outputs.append(output.item()))
        assert sorted(outputs) == ([2.0, 3.0] if info.has_last_stage else [])
        assert all(parameter.grad is None for module in modules for parameter in module.parameters())
        info.schedule.step(inputs, (None, None), lambda output, _: output.sum())
        # The output is input * product of ones: each weight's gradient is the sum of the inputs.
        assert all(parameter.grad.item() == 5.0 for module in modules for parameter in module.parameters())
        for module in modules:
            module.zero_grad()
