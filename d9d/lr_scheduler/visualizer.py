"""Plots a learning rate schedule before a job is started with it."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.optim import SGD, Optimizer

from d9d.core.protocol import LRSchedulerProtocol

SchedulerFactory: TypeAlias = Callable[[Optimizer], LRSchedulerProtocol]
"""Builds a schedule over an optimizer."""


def sample_learning_rates(factory: SchedulerFactory, num_steps: int, init_lr: float = 1.0) -> list[float]:
    """Return the learning rate of each step of a schedule.

    Args:
        factory: Builds the schedule over an optimizer of one parameter.
        num_steps: Number of steps.
        init_lr: Learning rate of that optimizer.
    """
    optimizer = SGD([torch.zeros((), requires_grad=True)], lr=init_lr)
    scheduler = factory(optimizer)
    rates: list[float] = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def visualize_lr_scheduler(factory: SchedulerFactory, num_steps: int, init_lr: float = 1.0) -> None:
    """Show a plot of a schedule in the browser or notebook.

    Args:
        factory: Builds the schedule over an optimizer of one parameter.
        num_steps: Number of steps to plot.
        init_lr: Learning rate of that optimizer; 1 plots multipliers.

    Raises:
        ImportError: If plotly is not installed.
    """
    try:
        from plotly import graph_objects  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("visualize_lr_scheduler draws with plotly. Install it: pip install plotly") from error
    rates = sample_learning_rates(factory, num_steps, init_lr)
    figure = graph_objects.Figure(graph_objects.Scatter(x=list(range(num_steps)), y=rates, mode="lines"))
    figure.update_layout(title="Learning rate schedule", xaxis_title="step", yaxis_title="learning rate")
    figure.show()
