"""Stages of a pipeline and the layers that each of them builds."""

import pytest

from d9d.pipelining.api import PipelineStageInfo, distribute_layers_for_pipeline_stage


def ranges(num_layers: int, num_pre: int, num_post: int, num_stages: int) -> list[tuple[int, int]]:
    return [
        distribute_layers_for_pipeline_stage(num_layers, num_pre, num_post, PipelineStageInfo(stage, num_stages))
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize(
    ("num_layers", "num_pre", "num_post", "num_stages", "expected"),
    [
        (8, 0, 0, 1, [(0, 8)]),
        (8, 1, 1, 1, [(0, 8)]),
        (8, 0, 0, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (10, 0, 0, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        # 8 + 1 + 1 = 10 over 2 stages: 5 each, one of them virtual.
        (8, 1, 1, 2, [(0, 4), (4, 8)]),
        # 6 + 2 = 8 over 4 stages: 2 each; the virtual layers fill the first stage.
        (6, 2, 0, 4, [(0, 0), (0, 2), (2, 4), (4, 6)]),
    ],
)
def test_layers_are_split_evenly_with_the_virtual_ones(num_layers, num_pre, num_post, num_stages, expected):
    assert ranges(num_layers, num_pre, num_post, num_stages) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 0, 1), r"num_layers \(-1\)"),
        ((2, 0, 0, 3), "use at most 2 stages"),
        ((4, 3, 0, 4), r"fewer than the virtual layers of the first \(3\)"),
        ((4, 0, 3, 4), r"or last \(3\)"),
    ],
)
def test_a_split_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ranges(*arguments)


def test_ends_of_the_pipeline():
    flags = [
        (info.is_current_stage_first, info.is_current_stage_last)
        for info in (PipelineStageInfo(current_stage=stage, num_stages=3) for stage in range(3))
    ]
    assert flags == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize(("stage", "num_stages"), [(-1, 2), (2, 2), (0, 0)])
def test_a_stage_outside_the_pipeline_is_refused(stage, num_stages):
    with pytest.raises(ValueError, match=r"num_stages \(0\)|valid stages are 0 to 1"):
        PipelineStageInfo(stage, num_stages)
