"""Lets tasks, models and user code act at fixed points of a job without changing its loop."""

from d9d.loop.event.core import Event, EventBus, TContext, subscribe, subscribe_annotated

__all__ = ["Event", "EventBus", "TContext", "subscribe", "subscribe_annotated"]
