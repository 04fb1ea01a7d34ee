"""Cut a LightningModule into pipeline stages, and build what runs them."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.module_names import nearest
from d9d.module.parallelism.explain import StageMap
from d9d.pipelining.api import PipelineSchedule
from d9d.pipelining.factory import (
    AnyPipelineScheduleConfig,
    PipelineScheduleInfo,
    build_forward_schedule,
    build_program_builder_from,
    build_schedule,
    stages_of_rank,
)
from d9d.pipelining.placement import build_stage_to_host_rank_topology
from d9d_lightning.checkpoints.stage_optimizers import StageCut
from d9d_lightning.gradients.precision import NormScope
from d9d_lightning.metrics.domains import MetricDomains
from d9d_lightning.pipeline.call import PipelineCall
from d9d_lightning.pipeline.stages import PipelineStages, StageModule, build_stages, plan_cut

__all__ = [
    "Pipeline",
    "PipelineOptions",
    "check_cut",
    "cut_module",
    "cut_of",
    "map_stages",
    "norm_scope_of",
    "pipeline_of",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What the user has said about the pipeline."""

    module_name: str
    """Dotted name of the submodule that is cut."""
    stages: PipelineStages
    """How it is cut."""
    schedule: AnyPipelineScheduleConfig
    """How stages are scheduled."""


class StageContext:
    """What stages run in: the forward context of the precision plugin of whichever Trainer runs them."""

    def __init__(self) -> None:
        self._enter: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def use(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        """Take what makes the contexts from now on."""
        self._enter = enter

    def __call__(self) -> AbstractContextManager[None]:
        """Make a context."""
        return self._enter()


# `Any`: the user's own inputs and outputs.
@dataclasses.dataclass(slots=True, kw_only=True)
class Pipeline:
    """The stages of a LightningModule on this rank, and what runs them."""

    options: PipelineOptions
    call: PipelineCall
    """Stands in for the submodule that was cut."""
    stages: list[StageModule]
    """Stages of this rank, in stage order."""
    info: PipelineScheduleInfo[Any, Any, Any]
    """The schedule that trains them, and which stages are where."""
    forward_only: PipelineSchedule[Any, Any, Any]
    """Runs their forward passes alone."""
    context: StageContext
    """What they run in."""
    cut: StageCut
    """Names of the whole module."""
    domains: MetricDomains
    """Ranks that metrics are gathered over."""
    mesh: DeviceMesh
    """One-dimensional mesh of this pipeline."""
    device: torch.device
    """Device of this rank."""

    @property
    def training(self) -> PipelineSchedule[Any, Any, Any]:
        """Runs forward and backward passes."""
        return self.info.schedule

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks of this pipeline, for collectives."""
        return self.cut.group

    @property
    def last_rank(self) -> int:
        """Rank in the group that has the last stage."""
        return _host_of_last_stage(self.info.stages_by_rank)

    @property
    def has_first_stage(self) -> bool:
        """Whether the first stage is on this rank."""
        return self.info.has_first_stage

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.info.has_last_stage

    def outside(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the LightningModule that no stage has; all ranks of the pipeline have these."""
        inside = {parameter for stage in self.stages for parameter in stage.parameters()}
        return [parameter for parameter in module.parameters() if parameter not in inside]

    def norm_scope(self, module: nn.Module) -> NormScope:
        """Return what the norm of this rank's gradients extends over: all stages, and once what is outside of them."""
        outside = () if self.group.rank() == 0 else self.outside(module)
        return NormScope(pipeline=self.mesh, uncounted=frozenset(outside))


_PIPELINES: weakref.WeakKeyDictionary[nn.Module, Pipeline] = weakref.WeakKeyDictionary()
"""Modules that have been cut."""


def pipeline_of(module: nn.Module) -> Pipeline | None:
    """Return the stages of a module that an earlier run has cut."""
    return _PIPELINES.get(module)


def cut_of(module: nn.Module) -> StageCut | None:
    """Return what the whole of a module is that an earlier run has cut."""
    pipeline = pipeline_of(module)
    return None if pipeline is None else pipeline.cut


def norm_scope_of(module: nn.Module | None) -> NormScope:
    """Return what norms of gradients of a module extend over on this rank, besides shards."""
    pipeline = None if module is None else pipeline_of(module)
    return NormScope() if module is None or pipeline is None else pipeline.norm_scope(module)


def check_cut(module: nn.Module, context: DistributedContext | None, options: PipelineOptions | None) -> None:
    """Refuse a module that an earlier run has cut in another way: layers of other ranks are gone.

    Raises:
        RuntimeError: With what to do.
    """
    pipeline = pipeline_of(module)
    if pipeline is None or (pipeline.domains.context is context and pipeline.options == options):
        return
    raise RuntimeError(
        f"this {type(module).__name__} was cut into pipeline stages by an earlier Trainer, on another mesh, schedule or "
        f"choice of stages: each rank has only its part of it. Save a checkpoint there, and load it into a new instance."
    )


def map_stages(module: nn.Module, options: PipelineOptions, pp_size: int) -> StageMap | None:
    """Say which stage each parameter of a module will be in. Changes nothing; None for a module that is cut already.

    Raises:
        ValueError: As `cut_module`.
    """
    if pipeline_of(module) is not None:
        return None
    submodule = _find(module, options.module_name)
    builder = build_program_builder_from(options.schedule)
    num_stages = pp_size * builder.num_stages_per_rank
    names, ranges = plan_cut(submodule, options.stages, num_stages, root=module)
    hosts = build_stage_to_host_rank_topology(pp_size, num_stages, builder.topology_style)
    stages: dict[str, int] = {}
    for stage, (start, end) in enumerate(ranges):
        for layer in names[start:end]:
            prefix = f"{options.module_name}.{layer}"
            below = submodule.get_submodule(layer).named_parameters(prefix=prefix, remove_duplicate=False)
            stages.update({name: stage for name, _ in below})
    return StageMap(stages=stages, of_first_rank=frozenset(stage for stage, rank in hosts.items() if rank == 0))


def cut_module(module: LightningModule, context: DistributedContext, options: PipelineOptions) -> Pipeline:
    """Cut a LightningModule in place: layers of other ranks go, and the pipelined submodule's forward pass with them.

    All ranks must call it. Nothing is distributed yet, and the module may be on the meta device.

    Raises:
        ValueError: If there is no such submodule, or it can not be cut; see `plan_cut`.
    """
    submodule = _find(module, options.module_name)
    own = stages_of_rank(context, options.schedule)
    names, ranges = plan_cut(submodule, options.stages, own[0].num_stages, root=module)
    cut = StageCut(
        parameter_names=tuple(name for name, _ in module.named_parameters()),
        state_names=tuple(module.state_dict()),
        group=context.mesh_for(DENSE_DOMAIN).get_group("pp"),
    )
    stage_context = StageContext()
    indices = [stage.current_stage for stage in own]
    built = build_stages(submodule, options.stages, names, ranges, indices, run_in=stage_context)
    by_index = dict(zip(indices, built, strict=True))
    info, _ = build_schedule(context, options.schedule, lambda stage: by_index[stage.current_stage])
    last_rank = _host_of_last_stage(info.stages_by_rank)
    pipeline = Pipeline(
        options=options,
        call=PipelineCall(options.module_name, submodule),
        stages=list(built),
        info=info,
        forward_only=build_forward_schedule(context, options.schedule, built),
        context=stage_context,
        cut=dataclasses.replace(cut, last_rank=last_rank),
        domains=MetricDomains(context, last_pp_rank=last_rank),
        mesh=context.mesh_for(DENSE_DOMAIN)["pp"],
        device=context.current_device,
    )
    _PIPELINES[module] = pipeline
    return pipeline


def _host_of_last_stage(stages_by_rank: Sequence[Sequence[int]]) -> int:
    last = max(stage for stages in stages_by_rank for stage in stages)
    return next(rank for rank, stages in enumerate(stages_by_rank) if last in stages)


def _find(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        names = [each for each, _ in module.named_modules() if each]
        raise ValueError(
            f"pipeline_module={name!r}: {type(module).__name__} has no such submodule{nearest(name, names)}."
        ) from error
