"""Build the optimizers and schedules of this rank's stages."""

from torch import nn
from torch.optim import SGD, Optimizer

from d9d.core.dist_context import REGULAR_DOMAIN, DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import trainable
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.control import (
    InitializeLRSchedulerContext,
    InitializeOptimizerStageContext,
    LRSchedulerProvider,
    OptimizerProvider,
)
from d9d.optim import localize_optimizer
from d9d.pipelining.training import PipelinedLRScheduler, PipelinedOptimizer


class OptimizerFactory:
    """Builds one optimizer and one schedule per stage, and presents them as one of each."""

    def __init__(
        self,
        dist_context: DistributedContext,
        tracked_modules: TrackedModules,
        optimizer_provider: OptimizerProvider,
        lr_scheduler_provider: LRSchedulerProvider,
        schedule: JobSchedule,
    ) -> None:
        """Take the providers of the job."""
        self._dist_context = dist_context
        self._modules = tracked_modules.modules
        self._optimizer_provider = optimizer_provider
        self._lr_scheduler_provider = lr_scheduler_provider
        self._schedule = schedule

    def build_optimizer_and_scheduler(self) -> tuple[PipelinedOptimizer, PipelinedLRScheduler]:
        """Build them; optimizers run on local shards where their update allows it. All ranks must call it.

        Raises:
            ValueError: On all ranks of a pipeline, if none of its stages has anything to train.
        """
        context = self._dist_context
        mesh_pp = context.mesh_for(REGULAR_DOMAIN)["pp"] if context.is_distributed else None
        if context.mesh_params.has_pipeline_parallel:
            has_own = any(trainable(module.parameters()) for module in self._modules)
            if not any(all_gather_object(has_own, context.pipeline_group)):
                raise ValueError("no stage of the pipeline has a parameter that requires a gradient.")
        optimizers = [self._build_optimizer(module) for module in self._modules]
        for optimizer in optimizers:
            localize_optimizer(optimizer)
        schedulers = [
            self._lr_scheduler_provider(
                InitializeLRSchedulerContext(
                    dist_context=context, total_steps=self._schedule.total_steps, optimizer=optimizer
                )
            )
            for optimizer in optimizers
        ]
        return PipelinedOptimizer(mesh_pp, list(optimizers)), PipelinedLRScheduler(mesh_pp, schedulers)

    def _build_optimizer(self, module: nn.Module) -> Optimizer:
        context = self._dist_context
        if context.mesh_params.has_pipeline_parallel and not trainable(module.parameters()):
            # A frozen stage among others that train. Providers may refuse it, and rightly so where it is the whole model.
            return SGD([{"params": []}])
        return self._optimizer_provider(InitializeOptimizerStageContext(dist_context=context, model=module))
