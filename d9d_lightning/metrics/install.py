"""torchmetrics under a mesh: states are gathered over the ranks that hold different data, and over no others."""
# Lightning's results and torchmetrics' counters have no public names
# pyright: reportPrivateUsage=false

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers.abstract import WrapperMetric

from d9d_lightning.metrics.domains import DOMAINS, MetricDomain, MetricDomains, active_domains
from d9d_lightning.metrics.sync import PackedCompute, StateSync, synced_together

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = [
    "MetricDomain",
    "MetricDomains",
    "install_metric_sync",
    "is_gathered",
    "results_of",
    "sync_over",
    "synced_together",
]

_STEPS = ("training_step", "validation_step", "test_step")
"""Hooks whose keys are complete when an epoch ends."""


def install_metric_sync(module: nn.Module) -> None:
    """Let every metric below a module use the mesh, unless it says itself how to gather. No communication.

    Needed again for metrics made since; cheap enough for every epoch. With the module of a running Trainer it happens by
    itself when an epoch ends, before any hook, and metrics that were logged in steps exchange their states at once then.
    """
    _install_below(module, "")
    if isinstance(module, LightningModule) and module._trainer is not None:
        connector = module.trainer._logger_connector
        vars(connector).setdefault("epoch_end_reached", _EpochEnd(connector))
        for results in results_of(module.trainer):
            vars(results).setdefault("metrics", _EpochMetrics(results))


def sync_over(metric: nn.Module, domain: MetricDomain) -> None:
    """Choose the ranks that a metric is gathered over; the default is "data". Goes with it into copies and pickles.

    All ranks must choose alike. Without a mesh it has no effect.

    Args:
        metric: A metric; of a collection, a wrapper or any other module, all metrics below it.
        domain: See `MetricDomain`.

    Raises:
        ValueError: For an unknown domain, if there is no metric, or if one has a ``process_group`` or
            ``dist_sync_fn`` of its own.
    """
    if domain not in DOMAINS:
        raise ValueError(f"the domain {domain!r} is unknown. Valid: {', '.join(map(repr, DOMAINS))}.")
    metrics = [child for child in metric.modules() if isinstance(child, Metric) and _has_states_to_sync(child)]
    if not metrics:
        raise ValueError(f"there is no torchmetrics.Metric in {type(metric).__name__}.")
    for child in metrics:
        if not _leaves_sync_to_us(child):
            raise ValueError(
                f"{type(child).__name__} has a process_group or dist_sync_fn of its own, which decides where it is "
                f"gathered. Leave it out, or do without sync_over."
            )
    for child in metrics:
        _sync_of(child, None).domain = domain


def is_gathered(metric: nn.Module) -> bool:
    """Tell whether ``compute`` of a metric, or of one below it, exchanges states over the mesh. No communication.

    Not where it says itself how to gather: those ranks are its own.
    """
    return any(
        isinstance(child, Metric)
        and _has_states_to_sync(child)
        and _leaves_sync_to_us(child)
        and child.sync_on_compute
        and _domain_of(child) is not None
        for child in metric.modules()
    )


def _domain_of(metric: Metric) -> MetricDomain:
    sync = StateSync.of(metric)
    return "data" if sync is None else sync.domain


def _install_below(module: nn.Module, prefix: str) -> None:
    domains = active_domains()
    for name, child in module.named_modules(prefix=prefix):
        if isinstance(child, MetricCollection):
            if "compute" not in vars(child):
                PackedCompute(child).install()
        elif isinstance(child, Metric) and _has_states_to_sync(child) and _leaves_sync_to_us(child):
            _sync_of(child, name)
            # A value that only some ranks keep, because others have been updated since, would keep them out of the
            # exchange of the next `compute`.
            child.compute_with_cache = False
            child._computed = None
            if domains is not None and not domains.updates_metrics:
                # torchmetrics would warn that nothing has been seen.
                child._update_count = max(child._update_count, 1)


def _has_states_to_sync(metric: Metric) -> bool:
    # These only call the metrics that they hold.
    return not isinstance(metric, (CompositionalMetric, WrapperMetric))


def _leaves_sync_to_us(metric: Metric) -> bool:
    return metric.dist_sync_fn is None and metric.process_group is None


def _sync_of(metric: Metric, name: str | None) -> StateSync:
    sync = StateSync.of(metric)
    if sync is None:
        sync = StateSync(metric)
        sync.install()
    if name and sync.name is None:
        sync.name = name
    return sync


def results_of(trainer: "Trainer") -> Iterator[_ResultCollection]:
    """Return what each loop of a Trainer keeps of what was logged."""
    epoch_loop = trainer.fit_loop.epoch_loop
    yield epoch_loop._results
    for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        yield loop._results


class _EpochEnd:
    """Stands for ``epoch_end_reached`` of Lightning's connector, and also computes what training steps have logged.

    [Note: ranks that read alone]
    Progress bars read the results on rank 0 alone, before the module's hooks at the end of an epoch. Rank 0 would then
    gather first what the others gather after that hook, and values of different metrics would meet. Here all ranks
    compute before any hook, as rank 0 does anyway under a bar. Lightning sees to it itself after a validation.
    """

    def __init__(self, connector: _LoggerConnector) -> None:
        self._connector = connector

    def __call__(self) -> None:
        connector, trainer = self._connector, self._connector.trainer
        type(connector).epoch_end_reached(connector)
        if active_domains() is None:
            return
        # For metrics that steps have made.
        _install_below(trainer.lightning_module, "")
        results = trainer._results if trainer.training else None
        if results is not None:
            results.metrics(on_step=False)


class _EpochMetrics:
    """Stands for ``metrics`` of Lightning's results, and exchanges the states of all that it computes at once.

    Those that were logged in steps go together: they are the same whenever a rank reads them, see
    [Note: ranks that read alone]. Others follow one by one.
    """

    def __init__(self, results: _ResultCollection) -> None:
        self._results = results

    def __call__(self, on_step: bool) -> _METRICS:
        together = contextlib.nullcontext() if on_step else synced_together(self._pending())
        with together:
            return type(self._results).metrics(self._results, on_step)

    def _pending(self) -> list[Metric]:
        pending: list[Metric] = []
        for _, item in self._results.valid_items():
            is_step = item.meta.fx.split(".")[0] in _STEPS
            if is_step and item.meta.on_epoch and not item.is_tensor and item._computed is None:
                pending.append(item.value)
        return pending
