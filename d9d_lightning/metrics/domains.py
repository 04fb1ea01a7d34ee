"""Which ranks the states of a metric come from, and to whom they go."""

import contextlib
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, DistributedContext
from d9d_lightning.jobs.launch import active_context

MetricDomain: TypeAlias = Literal["data", "data_parallel", "world"] | None
"""Over which ranks a metric is gathered.

"data": those that hold different data, by data or context parallelism. "data_parallel": those with different samples
only, where each part of a sequence is counted already. "world": all, tensor-parallel peers too. None: each rank of
these keeps a value of its own.
"""

DOMAINS: tuple[MetricDomain, ...] = ("data", "data_parallel", "world", None)
"""All domains."""

_ACTIVE: "weakref.WeakValueDictionary[str, MetricDomains]" = weakref.WeakValueDictionary()
"""Under "job" the domains of a pipelined Trainer. Metrics hold no groups, so that they can be copied and pickled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the states of a metric travel."""

    gather_group: dist.ProcessGroup | None
    """Ranks that gather first, of which this is one. None: nothing to gather."""
    contributes: bool
    """Whether this rank has states of its own to gather."""
    pipeline_group: dist.ProcessGroup | None
    """Ranks among which one then gives its states to the others. None: each keeps what it has."""
    pipeline_source: int
    """Group rank of the one that gives."""

    @property
    def receives(self) -> bool:
        """Whether this rank takes the states of another rank of its pipeline."""
        return self.pipeline_group is not None and self.pipeline_group.rank() != self.pipeline_source


class MetricDomains:
    """The ranks that metrics are gathered over.

    In a pipeline only the ranks that host the last stage update metrics, but all compute them.
    """

    def __init__(self, context: DistributedContext, *, last_pp_rank: int | None = None) -> None:
        """Describe the ranks. No communication.

        Args:
            context: The ranks and their meshes.
            last_pp_rank: Coordinate in the ``pp`` dimension of the ranks that host the last stage and so update
                metrics. None: all ranks update them.

        Raises:
            ValueError: If there is no such coordinate.
        """
        self._context = context
        pipeline_size = context.mesh_for(DENSE_DOMAIN).size(0)
        if last_pp_rank is not None and not 0 <= last_pp_rank < pipeline_size:
            raise ValueError(f"last_pp_rank ({last_pp_rank}) must be below pipeline_parallel ({pipeline_size}).")
        self._last_pp_rank = last_pp_rank if pipeline_size > 1 else None
        self._num_open_steps = 0

    @property
    def context(self) -> DistributedContext:
        """The ranks and their meshes."""
        return self._context

    @property
    def device(self) -> torch.device:
        """Where states travel."""
        return self._context.current_device

    @property
    def is_pipelined(self) -> bool:
        """Whether some ranks do not update metrics."""
        return self._last_pp_rank is not None

    @property
    def updates_metrics(self) -> bool:
        """Whether this rank runs the code that updates metrics."""
        return self._last_pp_rank is None or self._pp_group.rank() == self._last_pp_rank

    def activate(self) -> None:
        """Let all metrics of this process use these ranks, while the object exists and its Trainer is the last one."""
        _ACTIVE["job"] = self

    @contextlib.contextmanager
    def inside_step(self) -> Generator[None]:
        """Run user code that only ranks with the last stage run: syncs leave the other ranks of the pipeline out."""
        self._num_open_steps += 1
        try:
            yield
        finally:
            self._num_open_steps -= 1

    def route(self, domain: MetricDomain) -> Route:
        """Return how states travel now.

        Raises:
            NotImplementedError: For all ranks of a pipelined job, while only those with the last stage are there.
        """
        is_inside_step = self._num_open_steps > 0
        if self.is_pipelined and domain == "world" and is_inside_step:
            raise NotImplementedError(
                'sync_over(metric, "world"): the other ranks of the pipeline take no part in this step. Compute the '
                'metric at the end of the epoch, or gather it over "data".'
            )
        shares = self.is_pipelined and domain != "world" and not is_inside_step
        return Route(
            gather_group=self._gather_group(domain),
            contributes=self.updates_metrics,
            pipeline_group=self._pp_group if shares else None,
            pipeline_source=self._last_pp_rank or 0,
        )

    @property
    def _pp_group(self) -> dist.ProcessGroup:
        return self._context.mesh_for(DENSE_DOMAIN).get_group("pp")

    def _gather_group(self, domain: MetricDomain) -> dist.ProcessGroup | None:
        match domain:
            case "data":
                group = self._context.replica_group
            case "data_parallel":
                group = self._context.mesh_for(BATCH_DOMAIN).get_group("dp")
            case "world":
                group = dist.group.WORLD
            case None:
                group = None
        return None if group is None or group.size() == 1 else group


def active_domains() -> MetricDomains | None:
    """Return the ranks of the Trainer that ran last in this process; None if it ran on one rank.

    Raises:
        RuntimeError: If it runs a pipeline that has not said which ranks host the last stage.
    """
    context = active_context()
    if context is None:
        return None
    domains = _ACTIVE.get("job")
    if domains is not None and domains.context is context:
        return domains
    if context.mesh_for(DENSE_DOMAIN).size(0) > 1:
        raise RuntimeError(
            "metrics cannot be gathered: nobody has said which ranks of the pipeline host the last stage and update "
            "them. Keep a `MetricDomains(context, last_pp_rank=...)` and `activate` it."
        )
    return MetricDomains(context)
