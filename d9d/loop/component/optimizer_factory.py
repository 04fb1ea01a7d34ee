"""Build the optimizers and schedules of this rank's stages."""

from d9d.core.dist_context import REGULAR_DOMAIN, DistributedContext
from d9d.core.protocol import LRSchedulerProtocol, OptimizerProtocol
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

    def build_optimizer_and_scheduler(self) -> tuple[OptimizerProtocol, LRSchedulerProtocol]:
        """Build them; optimizers run on local shards where their update allows it."""
        context = self._dist_context
        mesh_pp = context.mesh_for(REGULAR_DOMAIN)["pp"] if context.is_distributed else None
        optimizers = [
            self._optimizer_provider(InitializeOptimizerStageContext(dist_context=context, model=module))
            for module in self._modules
        ]
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
