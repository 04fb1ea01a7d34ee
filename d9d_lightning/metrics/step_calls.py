"""Follows the calls that steps make of metrics.

[Note: metrics before the pipelined call]
With pipelines the code of a step before the pipelined call runs on all ranks, and twice on the last stage (see
[Note: one call]). What it adds to metrics must count once: in the whole run on the last stage. So in the other runs metrics
that are called get copies of their states, which are dropped; and they gather nothing, as ranks are not at the same place.
Of what a metric collects in a list only the list is copied: a copy of all elements in each microbatch would take a time that
grows with the square of their number. So an update may add elements and drop them, but not change them in place.
"""
# torchmetrics has no public way to see calls
# pyright: reportPrivateUsage=false

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType, TracebackType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric
from typing_extensions import override

__all__ = ["CallObserver", "KeptStates", "follow_metrics", "observe", "release_metrics", "stop_observing"]

_Update = Callable[..., None]


class CallObserver(Protocol):
    """Is told of the calls of metrics while a step runs."""

    def forward(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  # the metric's
        """Call a metric in place of its ``forward``, and return its value."""
        ...

    def before_update(self, metric: Metric) -> None:
        """Prepare for an ``update``, which may be part of a ``forward``."""
        ...


_OBSERVERS: list[CallObserver] = []
"""Who is told, innermost last; the others are not."""


def observe(observer: CallObserver) -> None:
    """Tell an observer of all calls until `stop_observing`, which must follow."""
    _OBSERVERS.append(observer)


def stop_observing() -> None:
    """End what `observe` began last."""
    _OBSERVERS.pop()


def follow_metrics(module: nn.Module) -> list[Metric]:
    """Follow every metric below a module. Needed again for metrics made since, but for copies. No communication.

    Returns:
        Those that were not followed before.
    """
    added = [metric for metric in _metrics_below(module) if _Follower.of(metric) is None]
    for metric in added:
        _Follower(metric).install()
    return added


def release_metrics(module: nn.Module) -> None:
    """Undo `follow_metrics`."""
    for metric in _metrics_below(module):
        follower = _Follower.of(metric)
        if follower is not None:
            follower.release()


def _metrics_below(module: nn.Module) -> list[Metric]:
    # A composition only calls its parts.
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    return [metric for metric in metrics if not isinstance(metric, CompositionalMetric)]


class _Follower:
    """Stands in a metric for ``forward`` and in front of ``update``, and goes with it into copies and pickles.

    These build ``update`` anew, through ``_wrap_update``. In a copy by ``copy.copy`` that is still the original's.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    @staticmethod
    def of(metric: Metric) -> "_Follower | None":
        found = vars(metric).get("_wrap_update")
        return found if isinstance(found, _Follower) else None

    def install(self) -> None:
        attributes = vars(self._metric)
        attributes["update"] = _FollowedUpdate(self._metric, attributes["update"])
        attributes["_wrap_update"] = self
        attributes["forward"] = self._forward

    def release(self) -> None:
        attributes = vars(self._metric)
        if isinstance(attributes["update"], _FollowedUpdate):
            attributes["update"] = attributes["update"].update
        del attributes["_wrap_update"], attributes["forward"]

    def __call__(self, update: _Update) -> _Update:
        owner = cast("Metric", update.__self__) if isinstance(update, MethodType) else self._metric
        if owner is not self._metric:
            follower = _Follower(owner)
            vars(owner).update(_wrap_update=follower, forward=follower._forward)
        return _FollowedUpdate(owner, type(owner)._wrap_update(owner, update))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the metric's
        if _OBSERVERS:
            return _OBSERVERS[-1].forward(self._metric, args, kwargs)
        return type(self._metric).forward(self._metric, *args, **kwargs)


class _FollowedUpdate:
    """Stands in a metric for its ``update``."""

    def __init__(self, metric: Metric, update: _Update) -> None:
        functools.update_wrapper(self, update)
        self._metric = metric
        self.update = update

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if _OBSERVERS:
            _OBSERVERS[-1].before_update(self._metric)
        self.update(*args, **kwargs)


class KeptStates(AbstractContextManager[None]):
    """Leaves metrics that are called inside as they were. See [Note: metrics before the pipelined call]."""

    def __init__(self) -> None:
        """Keep the states of all followed metrics."""
        self._kept: dict[int, tuple[Metric, dict[str, Any]]] = {}

    @override
    def __enter__(self) -> None:
        observe(self)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_observing()
        for metric, attributes in self._kept.values():
            vars(metric).update(attributes)
        self._kept.clear()

    def forward(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  # the metric's
        """Call a metric as it is."""
        self.before_update(metric)
        return type(metric).forward(metric, *args, **kwargs)

    def before_update(self, metric: Metric) -> None:
        """Put copies in place of what an update may change in place."""
        if id(metric) in self._kept:
            return
        attributes = vars(metric)
        self._kept[id(metric)] = metric, dict(attributes)
        copies = {name: _copy_to_update(value) for name, value in metric.metric_state.items()}
        attributes.update(copies, dist_sync_on_step=False)


def _copy_to_update(state: Any) -> Any:  # noqa: ANN401  # a tensor, or a list of what the metric collects
    # See [Note: metrics before the pipelined call].
    return state.detach().clone() if isinstance(state, torch.Tensor) else list(state)
