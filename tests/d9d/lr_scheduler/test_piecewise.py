"""Curves against formulas and torch's own schedules, phases by hand, and errors."""

import math

import pytest
import torch
import yaml
from pydantic import ValidationError
from torch.optim import SGD, AdamW

from d9d.core.protocol import LRSchedulerProtocol
from d9d.lr_scheduler.piecewise import (
    CurveCosine,
    CurveExponential,
    CurveLinear,
    CurvePoly,
    PiecewiseSchedulerConfig,
    piecewise_schedule,
    piecewise_scheduler_from_config,
)
from d9d.lr_scheduler.visualizer import sample_learning_rates


def rates(builder, num_steps, init_lr=1.0):
    return sample_learning_rates(builder.build, num_steps, init_lr)


def optimizer(*learning_rates):
    return SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in learning_rates], lr=1.0)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (CurveLinear(), [1.0, 2.0, 3.0, 4.0, 5.0]),
        (CurveCosine(), [1.0, 3 - math.sqrt(2), 3.0, 3 + math.sqrt(2), 5.0]),
        (CurvePoly(2.0), [1.0, 1.25, 2.0, 3.25, 5.0]),
        (CurveExponential(), [1.0, 5**0.25, 5**0.5, 5**0.75, 5.0]),
    ],
)
def test_curves_from_1_to_5(curve, expected):
    assert [curve.compute(1.0, 5.0, quarter / 4) for quarter in range(5)] == pytest.approx(expected)


def test_warmup_and_cosine_agree_with_torch():
    builder = piecewise_schedule(0.1, total_steps=20).for_steps(5, 1.0, CurveLinear()).fill_rest(0.0, CurveCosine())

    def torch_schedule(target):
        warmup = torch.optim.lr_scheduler.LinearLR(target, start_factor=0.1, total_iters=5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(target, T_max=15)
        return torch.optim.lr_scheduler.SequentialLR(target, [warmup, cosine], milestones=[5])

    assert rates(builder, 20, 3.0) == pytest.approx(sample_learning_rates(torch_schedule, 20, 3.0))


def test_phases_by_hand():
    builder = (
        piecewise_schedule(0.0, total_steps=10)
        .for_steps(2, 1.0, CurveLinear())
        .until_percentage(0.6, 1.0, CurveLinear())
        .fill_rest(0.0, CurveLinear())
    )
    assert rates(builder, 12) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_without_phases_the_multiplier_stays():
    assert rates(piecewise_schedule(0.5), 3, 2.0) == [1.0, 1.0, 1.0]


def test_the_rest_may_be_empty_and_fixed_phases_longer_than_the_job():
    builder = piecewise_schedule(1.0, total_steps=2).for_steps(2, 3.0, CurveLinear()).fill_rest(5.0, CurveLinear())
    assert rates(builder, 3) == [1.0, 2.0, 5.0]
    assert rates(piecewise_schedule(0.0, total_steps=2).for_steps(4, 1.0, CurveLinear()), 2) == [0.0, 0.25]


def test_each_group_keeps_its_own_rate():
    target = optimizer(1.0, 10.0)
    scheduler = piecewise_schedule(0.5).for_steps(2, 1.0, CurveLinear()).build(target)
    target.step()
    scheduler.step()
    assert [group["lr"] for group in target.param_groups] == [0.75, 7.5]
    assert scheduler.get_last_lr() == [0.75, 7.5]
    assert isinstance(scheduler, LRSchedulerProtocol)


def test_a_tensor_rate_is_changed_in_place():
    rate = torch.tensor(2.0)
    target = AdamW([torch.zeros(1, requires_grad=True)], lr=rate, capturable=False, foreach=False)
    held = target.param_groups[0]["lr"]
    scheduler = piecewise_schedule(0.5).for_steps(2, 1.0, CurveLinear()).build(target)
    target.step()
    scheduler.step()
    assert target.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(1.5)
    scheduler.load_state_dict({"last_epoch": 0, "base_lrs": [2.0]})
    assert held.item() == pytest.approx(1.0)


def test_state_is_numbers_and_resumes():
    def build(target):
        return piecewise_schedule(0.0).for_steps(4, 1.0, CurveLinear()).build(target)

    target = optimizer(1.0, 8.0)
    scheduler = build(target)
    for _ in range(3):
        target.step()
        scheduler.step()
    state = scheduler.state_dict()
    assert state == {"last_epoch": 3, "base_lrs": [1.0, 8.0]}

    resumed_target = optimizer(1.0, 8.0)
    resumed = build(resumed_target)
    resumed.load_state_dict(state)
    assert [group["lr"] for group in resumed_target.param_groups] == [0.75, 6.0]
    resumed_target.step()
    resumed.step()
    assert [group["lr"] for group in resumed_target.param_groups] == [1.0, 8.0]
    with pytest.raises(ValueError, match="2 parameter groups, but the optimizer has 1"):
        build(optimizer(1.0)).load_state_dict(state)


def test_all_problems_come_in_one_error():
    builder = (
        piecewise_schedule(-1.0, total_steps=100)
        .for_steps(0, 1.0, CurveLinear())
        .for_steps(50, 0.0, CurveExponential())
        .until_percentage(0.2, math.inf, CurveLinear())
        .fill_rest(0.0, CurveLinear())
        .until_percentage(1.5, 0.0, CurveLinear())
    )
    with pytest.raises(ValueError, match="learning rate schedule is wrong") as info:
        builder.build(optimizer(1.0))
    text = str(info.value)
    for part in (
        "initial_multiplier (-1.0)",
        "phase 0, for_steps(0): the number of steps",
        "phase 1, for_steps(50): an exponential curve can not go from 1 to 0",
        "phase 2, until_percentage(0.2): target_multiplier (inf)",
        "phase 2, until_percentage(0.2): ends at step 20 of 100, but the phases before it end at step 50",
        "phase 3, fill_rest(): must be the last of the 5 phases",
        "phase 4, until_percentage(1.5): must be above 0 and at most 1",
    ):
        assert part in text


def test_open_ended_jobs_can_not_use_parts_of_the_whole():
    builder = piecewise_schedule(1.0).until_percentage(0.5, 1.0, CurveLinear()).fill_rest(0.0, CurveLinear())
    with pytest.raises(ValueError, match="needs total_steps") as info:
        builder.build(optimizer(1.0))
    assert str(info.value).count("needs total_steps") == 2


YAML = """
initial_multiplier: 0.0
phases:
  - {mode: steps, steps: 2, target_multiplier: 1.0, curve: {type: linear}}
  - {mode: percentage, percentage: 0.5, target_multiplier: 0.25, curve: {type: poly, power: 2}}
  - {mode: rest, target_multiplier: 0.25, curve: {type: cosine}}
"""


def test_config_builds_what_the_builder_builds():
    config = PiecewiseSchedulerConfig.model_validate(yaml.safe_load(YAML))

    def from_config(target):
        return piecewise_scheduler_from_config(config, target, total_steps=8)

    # From 1 to 1/4 in two steps along p^2: 1, 1 - 3/4 * 1/4, 1/4.
    assert sample_learning_rates(from_config, 6) == pytest.approx([0.0, 0.5, 1.0, 0.8125, 0.25, 0.25])


@pytest.mark.parametrize(
    "phase",
    [
        {"mode": "steps", "steps": 0, "target_multiplier": 1.0, "curve": {"type": "linear"}},
        {"mode": "percentage", "percentage": 50, "target_multiplier": 1.0, "curve": {"type": "linear"}},
        {"mode": "rest", "target_multiplier": -1.0, "curve": {"type": "linear"}},
        {"mode": "rest", "target_multiplier": 1.0, "curve": {"type": "poly", "power": 0}},
        {"mode": "rest", "target_multiplier": 1.0, "curve": {"type": "step"}},
        {"mode": "rest", "target_multiplier": 1.0, "curve": {"type": "linear"}, "steps": 3},
    ],
)
def test_config_refuses_wrong_phases(phase):
    with pytest.raises(ValidationError):
        PiecewiseSchedulerConfig.model_validate({"initial_multiplier": 1.0, "phases": [phase]})
