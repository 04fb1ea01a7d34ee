"""Which losses stand out, against the formula on the same numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from d9d.loop.component import JobSchedule, LossSpikeDetector
from d9d.loop.config import JobScheduleConfig, LossSpikeConfig
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.train import EVENT_TRAIN_LOSS_SPIKE

ENDLESS = SimpleNamespace(total_steps=None)
# Median 3, distances 2 1 0 1 2 with median 1: a deviation is 1.4826.
WINDOW = [1.0, 2.0, 3.0, 4.0, 5.0]


def spikes(losses: list[float], **options) -> list[tuple[int, float, float]]:
    bus, found = EventBus(), []
    bus.subscribe(EVENT_TRAIN_LOSS_SPIKE, lambda context: found.append((context.step, context.loss, context.median)))
    schedule = JobSchedule(JobScheduleConfig(total_steps=100), ENDLESS)
    detector = LossSpikeDetector(
        LossSpikeConfig(**{"window_steps": 5, "num_deviations": 2.0, **options}), schedule, bus
    )
    for loss in [*losses, 0.0, 0.0]:  # read two steps later
        detector.note(torch.tensor(loss, dtype=torch.float64))
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("loss", "is_spike"), [(3 + 2 * 1.4826 + 1e-6, True), (3 + 2 * 1.4826 - 1e-6, False), (-9.0, False)]
)
def test_the_limit(loss, is_spike):
    assert spikes([*WINDOW, loss]) == ([(6, loss, 3.0)] if is_spike else [])


def test_nothing_is_judged_before_the_window_is_full():
    assert spikes([*WINDOW[:4], 1e9]) == []


def test_the_window_moves_on():
    # Of 2 3 4 5 9 the median is 4, and a deviation 1.4826; 9 was a spike itself.
    assert [step for step, _, _ in spikes([*WINDOW, 9.0, 6.9])] == [6]
    assert [step for step, _, _ in spikes([*WINDOW, 9.0, 7.0])] == [6, 7]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_always_stands_out_and_stays_out_of_the_window(loss):
    found = spikes([1.0, loss, *WINDOW[1:], 3.0])
    assert [step for step, _, _ in found] == [2]
    assert math.isnan(found[0][2])


def test_without_a_config_nothing_is_looked_at():
    detector = LossSpikeDetector(None, JobSchedule(JobScheduleConfig(total_steps=1), ENDLESS), EventBus())
    detector.note(torch.tensor(math.nan))
