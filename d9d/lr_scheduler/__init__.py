"""Learning rate schedules and a plot of them."""

from d9d.lr_scheduler.visualizer import SchedulerFactory, visualize_lr_scheduler

__all__ = ["SchedulerFactory", "visualize_lr_scheduler"]
