"""Learning rates by config."""

import pytest
import torch
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import AutoLRSchedulerConfig, AutoLRSchedulerProvider
from d9d.loop.control import InitializeLRSchedulerContext


def test_the_phases_span_the_steps_of_the_job():
    config = AutoLRSchedulerConfig.model_validate(
        {
            "name": "piecewise",
            "scheduler": {
                "initial_multiplier": 0.0,
                "phases": [{"mode": "rest", "target_multiplier": 1.0, "curve": {"type": "linear"}}],
            },
        }
    )
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    scheduler = AutoLRSchedulerProvider(config)(
        InitializeLRSchedulerContext(dist_context=DeviceMeshParameters().build(), total_steps=4, optimizer=optimizer)
    )
    optimizer.step()
    scheduler.step()
    scheduler.step()
    # Half of the way from 0 to 1, times the learning rate of the optimizer.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 2.0)
