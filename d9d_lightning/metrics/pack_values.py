"""What metrics show of a step that runs in microbatches: their value over all samples of the pack.

[Note: states of a pack]
``forward`` of a metric computes the value of what it is called with from states of these samples alone, which it then
adds to those of the epoch. Here the former are noted, and summed up over the microbatches of a pack, beside the metric:
what ``forward`` returns, and the states of the epoch, stay as torchmetrics makes them. Only when the metric is logged are
the states of the pack put into it for one ``compute``.

States are put together as torchmetrics does it. A metric that needs its whole state to be updated, as those of users do by
default, is updated with the samples once more. Of several calls in one microbatch the last one counts, as without
microbatches.
"""
# torchmetrics has no public way to compute from other states
# pyright: reportPrivateUsage=false

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric

from d9d_lightning.metrics.step_calls import follow_metrics, observe, stop_observing

__all__ = ["PackValues"]

_States = dict[str, Any]
"""Tensors, or lists of what a metric collects."""

_RESTORED = ("_update_count", "_computed", "_to_sync", "_should_unsync", "_is_synced", "_cache", "compute_on_cpu")
"""What ``update`` and ``compute`` of a metric change or look at, beside its states."""


class PackValues:
    """Values of metrics over the microbatches of a pack. See [Note: states of a pack]."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self._microbatch = 0
        self._packs: dict[int, _MetricPack] = {}
        self._unknown: set[int] = set()

    def begin_microbatch(self) -> None:
        """Note the calls of a run of the user's step; `end_microbatch` follows."""
        self._microbatch += 1
        observe(self)

    def end_microbatch(self) -> None:
        """Note no more calls."""
        stop_observing()

    def follow(self, module: nn.Module) -> None:
        """Note calls of metrics that were made since `follow_metrics`. In this pack they show their last call."""
        self._unknown.update(map(id, follow_metrics(module)))

    def clear(self) -> None:
        """Forget the pack."""
        self._packs.clear()
        self._unknown.clear()

    def show(self, metric: Metric) -> None:
        """Let the metric's last value be that of the pack, where several of its microbatches have called it.

        All ranks must call it for a metric with ``dist_sync_on_step``.
        """
        parts = self._parts(metric)
        if parts is None or all(part.num_microbatches < 2 for part in parts):
            return
        with contextlib.ExitStack() as states, torch.no_grad():
            for part in parts:
                states.enter_context(part.in_metric())
            metric._forward_cache = metric.compute()

    def _parts(self, metric: Metric) -> "list[_MetricPack] | None":
        """Return the states that a metric is computed from; None if some of them are not known."""
        if not isinstance(metric, CompositionalMetric):
            pack = None if id(metric) in self._unknown else self._packs.get(id(metric))
            return None if pack is None else [pack]
        parts: list[_MetricPack] = []
        for operand in (metric.metric_a, metric.metric_b):
            if isinstance(operand, Metric):
                of_operand = self._parts(operand)
                if of_operand is None:
                    return None
                parts += [part for part in of_operand if part not in parts]
        return parts

    def before_update(self, metric: Metric) -> None:
        """Do nothing: without ``forward`` there is no value of a step."""

    def forward(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401  # the metric's
        """Call a metric as it is, and note the states of its value."""
        forward = type(metric).forward
        if forward is not Metric.forward:
            # It has a way of its own to its value, such as a wrapper.
            return forward(metric, *args, **kwargs)
        attributes = vars(metric)
        compute = attributes["compute"]
        noted: list[_States] = []

        def noting(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the metric's
            noted.append(_states_of(metric))
            return compute(*args, **kwargs)

        attributes["compute"] = noting
        try:
            value = forward(metric, *args, **kwargs)
        finally:
            attributes["compute"] = compute
        pack = self._packs.setdefault(id(metric), _MetricPack(metric))
        pack.add(self._microbatch, noted[-1], args, kwargs)
        return value


class _MetricPack:
    """States of one metric over the microbatches so far."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._microbatch = 0
        self._before: _States | None = None
        self._states: _States | None = None
        self.num_microbatches = 0

    @torch.no_grad()
    def add(self, microbatch: int, states: _States, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the states of a call, in place of those of earlier calls in the same microbatch."""
        if microbatch != self._microbatch:
            self._microbatch, self._before = microbatch, self._states
            self.num_microbatches += 1
        metric, before = self._metric, self._before
        if before is None:
            self._states = states
        elif metric.full_state_update is False:
            with _states_in(metric, states, self.num_microbatches):
                metric._reduce_states(before)
                self._states = _states_of(metric)
        else:
            with _states_in(metric, before, self.num_microbatches - 1):
                # Updates may be in place, and there may be further calls in this microbatch.
                _put(metric, metric._copy_state_dict())
                metric.update(*args, **kwargs)
                self._states = _states_of(metric)

    @contextlib.contextmanager
    def in_metric(self) -> Generator[None]:
        """Let the metric have the states of the pack."""
        with _states_in(self._metric, cast("_States", self._states), self.num_microbatches):
            yield


@contextlib.contextmanager
def _states_in(metric: Metric, states: _States, num_updates: int) -> Generator[None]:
    """Let a metric have other states for a while, as its ``forward`` does."""
    attributes = vars(metric)
    own = dict(metric.metric_state)
    restored = {name: attributes[name] for name in _RESTORED}
    attributes.update(
        _update_count=num_updates,
        _computed=None,
        _to_sync=metric.dist_sync_on_step,
        _should_unsync=False,
        compute_on_cpu=False,
    )
    _put(metric, states)
    try:
        yield
    finally:
        _put(metric, own)
        attributes.update(restored)


def _states_of(metric: Metric) -> _States:
    """Return what is there now, without graphs; metrics make new tensors, but may go on with a list."""
    return {
        name: [_detached(element) for element in value] if isinstance(value, list) else _detached(value)
        for name, value in metric.metric_state.items()
    }


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _put(metric: Metric, states: _States) -> None:
    for name, value in states.items():
        setattr(metric, name, value)  # introspection: torchmetrics keeps states as attributes
