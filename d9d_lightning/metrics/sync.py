"""Synchronizes the states of torchmetrics: all states of a metric at once, of several metrics at once where possible.

[Note: what ranks decide on]
Whether a rank takes part in a collective depends on the metrics and their options, which all ranks have alike, and never
on what a rank has updated: ranks may have seen different numbers of batches, or none.
"""
# `Metric.sync` calls `_sync_dist` as the one place where states are exchanged; there is no public one
# pyright: reportPrivateUsage=false

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from d9d_lightning.metrics.domains import DOMAINS, MetricDomain, MetricDomains, Route, active_domains
from d9d_lightning.metrics.packing import ExchangeError, broadcast_tree, check_sendable, gather_trees

_GENERIC_OVERRIDES = ("torchmetrics.detection.mean_ap", "torchmetrics.detection._mean_ap")
"""Modules whose own ``_sync_dist`` only exchanges tuples in lists as well, over all ranks; states of any kind do here."""

Reduction = Callable[[Any], Any] | None
"""Takes stacked tensors or a list, as `torchmetrics.Metric.add_state` documents."""


class Record(TypedDict):
    """What a rank knows of a metric."""

    metric: str
    """Its label, the same on all ranks."""
    num_updates: int
    """Since the last reset."""
    states: dict[str, Any]
    """Tensors, or lists of tensors or of whatever the metric collects."""
    attributes: dict[str, Any]
    """Plain values beside the states, some of which metrics only learn in ``update``."""


class _Bare(Metric):
    @override
    def update(self) -> None: ...

    @override
    def compute(self) -> None: ...


_MACHINERY = frozenset(vars(_Bare()))
"""Attributes that each metric has."""

_SCOPES: list[dict[int, Record]] = []
"""Records of the open `synced_together` blocks, innermost last, by the id of the metric."""


class StateSync:
    """Stands in a metric for its ``_sync_dist``, and goes with it into copies and pickles.

    Without a mesh, and where the caller says how to gather, it is what it stands for.
    """

    def __init__(self, metric: Metric) -> None:
        """Belong to a metric; `install` puts it there."""
        self.metric = metric
        self.name: str | None = None
        """Name of the metric in its module, where known."""
        self.domain: MetricDomain = "data"

    @property
    def label(self) -> str:
        """What errors call the metric, and by which ranks see that they compute the same one."""
        kind = type(self.metric).__name__
        return kind if self.name is None else f"{self.name!r} ({kind})"

    @staticmethod
    def of(metric: Metric) -> "StateSync | None":
        """Return what stands in a metric, or None."""
        found = vars(metric).get("_sync_dist")
        return found if isinstance(found, StateSync) else None

    def install(self) -> None:
        """Take the place of the metric's ``_sync_dist``."""
        vars(self.metric)["_sync_dist"] = self

    @property
    def is_packable(self) -> bool:
        """Whether the metric leaves the exchange of its states to torchmetrics."""
        override = type(self.metric)._sync_dist
        return override is Metric._sync_dist or override.__module__ in _GENERIC_OVERRIDES

    @property
    def runs_on_compute(self) -> bool:
        """Whether ``compute`` is going to exchange the states here. The same on all ranks."""
        metric = self.metric
        is_own_way = metric.dist_sync_fn is not None or metric.process_group is not None
        is_plain = self.is_packable and type(metric).sync is Metric.sync
        return is_plain and metric._to_sync and not metric._is_synced and not is_own_way

    def __call__(
        self,
        dist_sync_fn: Callable[..., list[torch.Tensor]] = gather_all_tensors,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Replace the states by those of all ranks of the metric's domain. All of them must call it.

        Raises:
            NotImplementedError: If the metric's own exchange cannot run on the domain; on all ranks.
            RuntimeError: If the states of some rank cannot be sent, or do not fit together; on all ranks.
        """
        metric = self.metric
        if type(metric).sync is Metric.sync and metric._cache is None:
            raise RuntimeError(f"{self.label} shares its parts with a metric that `copy.copy` made: use `clone()`.")
        is_own_way = dist_sync_fn is not gather_all_tensors or (process_group or metric.process_group) is not None
        domains = None if is_own_way else active_domains()
        if domains is None:
            type(metric)._sync_dist(metric, dist_sync_fn, process_group)
        elif self.is_packable:
            self._exchange(domains)
        else:
            self._run_override(domains)

    def _exchange(self, domains: MetricDomains) -> None:
        route = domains.route(self.domain)
        record = next((scope.pop(id(self.metric)) for scope in reversed(_SCOPES) if id(self.metric) in scope), None)
        if record is None:
            [record] = _synchronize([self], route, domains.device)
        self._adopt(record, route)

    def _run_override(self, domains: MetricDomains) -> None:
        """Let all ranks of a pipeline hold the states of the last stage, and then exchange them as the metric does."""
        if domains.is_pipelined and self.domain == "world":
            raise NotImplementedError(f'sync_over(metric, "world"): {self.label} exchanges its states in its own way.')
        route = domains.route(self.domain)
        [record] = _synchronize([self], replace(route, gather_group=None), domains.device)
        self._adopt(record, route)
        if route.gather_group is not None:
            type(self.metric)._sync_dist(self.metric, gather_all_tensors, route.gather_group)

    def _adopt(self, record: Record, route: Route) -> None:
        metric = self.metric
        for name, value in record["states"].items():
            setattr(metric, name, value)  # introspection: torchmetrics keeps states as attributes
        is_fed_elsewhere = route.receives or not route.contributes
        if is_fed_elsewhere or not metric._update_count:
            # Past __setattr__, as torchmetrics guards some names there.
            vars(metric).update(record["attributes"])
        if is_fed_elsewhere:
            metric._update_count = record["num_updates"]

    def read(self, joined: dict[tuple[int, ...], torch.Tensor] | None) -> Record:
        """Return what this rank knows.

        Args:
            joined: The long tensors into which lists have been joined, by the ids of their elements, since metrics
                may share lists. None leaves lists as they are.

        Raises:
            ExchangeError: If something of it cannot be sent.
        """
        metric = self.metric
        states: dict[str, Any] = dict(metric.metric_state)
        for name, value in metric.metric_state.items():
            try:
                check_sendable(value)
                if joined is not None and self._is_joined(name) and isinstance(value, list) and len(value) > 1:
                    states[name] = [_join(value, joined)]
            except (TypeError, RuntimeError) as error:
                raise ExchangeError(f"state {name!r} of {self.label}: {type(error).__name__}: {error}") from error
        attributes = {name: value for name, value in vars(metric).items() if self._is_plain_attribute(name, value)}
        return Record(metric=self.label, num_updates=metric._update_count, states=states, attributes=attributes)

    def _is_plain_attribute(self, name: str, value: object) -> bool:
        if name in _MACHINERY or name == "_sync_dist" or name in self.metric._defaults:
            return False
        try:
            check_sendable(value)
        except TypeError:
            return False
        return True

    def merge(self, records: Sequence[Record]) -> Record:
        """Reduce the states of several ranks as torchmetrics does.

        Args:
            records: Of all ranks that take part, in order.

        Raises:
            ExchangeError: If the states do not fit together.
        """
        names = [sorted(record["states"]) for record in records]
        if any(other != names[0] for other in names):
            raise ExchangeError(f"the ranks have different states of {self.label}: {names}")
        states: dict[str, Any] = {}
        for name in records[0]["states"]:
            try:
                states[name] = self._merge_one(name, records)
            except Exception as error:
                raise ExchangeError(f"state {name!r} of {self.label}: {type(error).__name__}: {error}") from error
        updated = next((record for record in records if record["num_updates"]), None)
        return Record(
            metric=self.label,
            num_updates=sum(record["num_updates"] for record in records),
            states=states,
            attributes={} if updated is None else updated["attributes"],
        )

    def _merge_one(self, name: str, records: Sequence[Record]) -> object:
        values = [record["states"][name] for record in records]
        reduction = self._reduction(name)
        is_joined = self._is_joined(name)
        if is_joined or all(isinstance(value, list) for value in values):
            lists = [value if isinstance(value, list) else [value] for value in values]
            merged = _interleave(lists, self._device_of(name))
            if not merged and is_joined:
                merged = [torch.tensor([], device=self.metric.device, dtype=self.metric.dtype)]
            return merged if reduction is None or not merged else reduction(merged)
        if any(isinstance(value, list) for value in values):
            raise TypeError("it is a list on some ranks and a tensor on others")
        are_idle = [not record["num_updates"] for record in records]
        stacked = torch.stack(_fit([value.to(self._device_of(name)) for value in values], are_idle))
        return stacked if reduction is None else reduction(stacked)

    def _reduction(self, name: str) -> Reduction:
        return cast("Reduction", self.metric._reductions[name])

    def _is_joined(self, name: str) -> bool:
        # By what it was, since some metrics replace the list by one tensor now and then.
        return self._reduction(name) is dim_zero_cat and isinstance(self.metric._defaults[name], list)

    def _device_of(self, name: str) -> torch.device:
        own = self.metric.metric_state[name]
        first = own[0] if isinstance(own, list) and own else own
        return first.device if isinstance(first, torch.Tensor) else self.metric.device


class PackedCompute:
    """Stands in a collection for its ``compute``, and exchanges the states of its metrics at once."""

    def __init__(self, collection: MetricCollection) -> None:
        """Belong to a collection."""
        self.collection = collection

    def install(self) -> None:
        """Take the place of the collection's ``compute``."""
        vars(self.collection)["compute"] = self

    def __call__(self) -> dict[str, Any]:
        """Compute all metrics of the collection. All ranks of their domains must call it."""
        with synced_together(self.collection.values(copy_state=False)):
            return type(self.collection).compute(self.collection)


@contextlib.contextmanager
def synced_together(metrics: Iterable[Metric]) -> Generator[None]:
    """Exchange the states of several metrics at once, for the first ``compute`` of each inside the block.

    One header and one row of bytes for the metrics of each domain. Nothing is kept beyond the block, inside which
    metrics must not be updated. All ranks must enter it with the same metrics. Metrics that exchange their states in
    their own way, and wrappers, whose ``compute`` may change what they wrap, do so as outside.

    Raises:
        RuntimeError: See `StateSync`.
    """
    unique = {id(metric): StateSync.of(metric) for metric in metrics}
    syncs = [sync for sync in unique.values() if sync is not None and sync.runs_on_compute]
    domains = active_domains() if len(syncs) > 1 else None
    records: dict[int, Record] = {}
    if domains is not None:
        for domain in DOMAINS:
            together = [sync for sync in syncs if sync.domain == domain]
            if together:
                merged = _synchronize(together, domains.route(domain), domains.device)
                records |= {id(sync.metric): record for sync, record in zip(together, merged, strict=True)}
    _SCOPES.append(records)
    try:
        yield
    finally:
        _SCOPES.pop()


def _synchronize(syncs: Sequence[StateSync], route: Route, device: torch.device) -> list[Record]:
    if route.gather_group is None and route.pipeline_group is None:
        # As on one process: nothing is stacked or joined.
        return [
            Record(metric=sync.label, num_updates=0, states=sync.metric.metric_state, attributes={}) for sync in syncs
        ]
    try:
        if route.pipeline_group is None:
            return _gather(syncs, route, device)
        if route.receives:
            received = broadcast_tree(None, route.pipeline_group, route.pipeline_source, device)
            return [_check_label(sync, record) for sync, record in zip(syncs, received, strict=True)]
        own: list[Record] = []

        def build() -> list[Record]:
            own.extend(_gather(syncs, route, device))
            return own

        broadcast_tree(build, route.pipeline_group, route.pipeline_source, device)
        return own
    except ExchangeError as error:
        raise RuntimeError(f"metrics could not be synchronized: {error}") from error


def _gather(syncs: Sequence[StateSync], route: Route, device: torch.device) -> list[Record]:
    if route.gather_group is None:
        return [sync.read(None) for sync in syncs]
    own: list[Record] = []

    def build() -> list[Record]:
        joined: dict[tuple[int, ...], torch.Tensor] = {}
        own.extend(sync.read(joined) for sync in syncs)
        return own

    gathered = gather_trees(build if route.contributes else None, route.gather_group, device)
    # Its own tensors keep their place in the autograd graph.
    of_ranks = [own if rank == route.gather_group.rank() else cast("list[Record]", tree) for rank, tree in gathered]
    labels = [[record["metric"] for record in records] for records in of_ranks]
    if any(other != labels[0] for other in labels):
        raise ExchangeError(f"the ranks of the group compute different metrics at the same time: {labels}")
    return [sync.merge(records) for sync, records in zip(syncs, zip(*of_ranks, strict=True), strict=True)]


def _check_label(sync: StateSync, record: Record) -> Record:
    if record["metric"] != sync.label:
        raise ExchangeError(f"the last stage has computed {record['metric']}, and this rank {sync.label}")
    return record


def _join(elements: list[torch.Tensor], joined: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    key = tuple(map(id, elements))
    if key not in joined:
        joined[key] = dim_zero_cat(elements)
    return joined[key]


def _interleave(lists: Sequence[list[Any]], device: torch.device) -> list[Any]:
    """Return the first elements of all lists, then the second ones, and so on: the order of torchmetrics."""
    missing = object()
    return [
        element.to(device) if isinstance(element, torch.Tensor) else element
        for elements in itertools.zip_longest(*lists, fillvalue=missing)
        for element in elements
        if element is not missing
    ]


def _fit(tensors: Sequence[torch.Tensor], are_idle: Sequence[bool]) -> list[torch.Tensor]:
    """Give initial values the shape of updated ones, which may have found it out, and all tensors one type."""
    shape = next((tensor.shape for tensor, is_idle in zip(tensors, are_idle, strict=True) if not is_idle), None)
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [
        (tensor if shape is None or not is_idle else tensor.expand(shape)).to(dtype)
        for tensor, is_idle in zip(tensors, are_idle, strict=True)
    ]
