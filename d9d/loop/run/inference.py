"""The inference loop: the order of the calls of a step, and nothing else."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d9d.core.dist_context import DistributedContext
from d9d.core.failures.watch import JobWatch, watching
from d9d.core.fsdp_internals import fsdp_units
from d9d.core.parent_watch import ends_with_torchrun
from d9d.core.types import MicrobatchPack
from d9d.loop.component import (
    DevicePackStream,
    InferenceTaskOperator,
    JobProfiler,
    JobSchedule,
    ManualGarbageCollector,
    StateCheckpointer,
    TimeoutManager,
)
from d9d.loop.component.progress import TrainingProgress
from d9d.loop.control import FinalizeContext, InferenceTask
from d9d.loop.event import EventBus
from d9d.loop.event.catalogue.common import EventFinishedContext, EventStepContext
from d9d.loop.event.catalogue.inference import (
    EVENT_INFERENCE_FINISHED,
    EVENT_INFERENCE_FORWARD_POST,
    EVENT_INFERENCE_FORWARD_PRE,
    EVENT_INFERENCE_READY,
    EVENT_INFERENCE_STEP_POST,
    EVENT_INFERENCE_STEP_PRE,
    EventInferenceReadyContext,
)
from d9d.loop.run.job_state import CheckpointedState
from d9d.pipelining.failure import naming_failed_peers

# `Any` below: the types of batches, inputs and outputs are known to the job alone; the loop passes them on.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InferenceJobState:
    """The components of a configured job, each built once with its collaborators."""

    dist_context: DistributedContext
    event_bus: EventBus
    task: InferenceTask[Any, Any, Any, Any, Any]
    packs: DevicePackStream
    schedule: JobSchedule
    step_sync: "StepSync"
    task_operator: InferenceTaskOperator[Any, Any, Any, Any, Any]
    progress: TrainingProgress
    profiler: JobProfiler
    gc: ManualGarbageCollector
    timeouts: TimeoutManager
    checkpointer: StateCheckpointer
    checkpointed: CheckpointedState


class Inference:
    """A configured inference job."""

    def __init__(self, state: InferenceJobState) -> None:
        """Take the components; use `InferenceConfigurator` to build them."""
        self._state = state

    def infer(self) -> None:
        """Resume from the newest checkpoint, if there is one, and run the model over the rest of the data.

        All ranks must call it. A job that is complete already returns at once.

        Raises:
            RuntimeError: If the data ends before the last step.
            ValueError: If the model is sharded and ranks have different numbers of microbatches in a step.
        """
        with watching(self._state.dist_context) as watch:
            self._infer(watch)
            self._state.checkpointer.end_count()

    def _infer(self, watch: JobWatch) -> None:
        job = self._state
        job.checkpointer.load_last_checkpoint(job.checkpointed)
        if job.schedule.current_step >= job.schedule.total_steps:
            job.dist_context.logger.info(
                "the job is complete: %d steps are done. To run it anew, name another checkpointing.save_dir.",
                job.schedule.current_step,
            )
            return
        with contextlib.ExitStack() as ending, contextlib.ExitStack() as stack:
            stack.enter_context(ends_with_torchrun())
            stack.enter_context(job.gc)
            stack.enter_context(job.progress.open())
            profiler = stack.enter_context(job.profiler.open())
            packs = stack.enter_context(contextlib.closing(iter(job.packs)))
            stack.enter_context(job.checkpointer.open())
            stack.enter_context(watch.noting())
            stack.enter_context(naming_failed_peers(job.dist_context))
            job.event_bus.trigger(EVENT_INFERENCE_READY, EventInferenceReadyContext())
            step_context = EventStepContext(schedule=job.schedule)
            while job.schedule.current_step < job.schedule.total_steps:
                self._step(packs, step_context)
                job.checkpointer.checkpoint_if_needed(job.checkpointed)
                if profiler is not None:
                    profiler.step()
                job.progress.step()
                job.progress.show(job.schedule.current_step, {})
            ending.enter_context(job.dist_context.activity.inside("end of the job", None))
            job.task.finalize(FinalizeContext())
            job.event_bus.trigger(EVENT_INFERENCE_FINISHED, EventFinishedContext())

    def _step(self, packs: Iterator[MicrobatchPack[Any]], context: EventStepContext) -> None:
        """Run one pack through the model."""
        job, bus, activity = self._state, self._state.event_bus, self._state.dist_context.activity
        activity.step = job.schedule.step_in_progress
        bus.trigger(EVENT_INFERENCE_STEP_PRE, context)
        activity.place = "reading data"
        pack = self._next_pack(packs)

        activity.place = "forward passes"
        with bus.bounded(EVENT_INFERENCE_FORWARD_PRE, EVENT_INFERENCE_FORWARD_POST, context):
            job.task_operator.forward(pack)

        job.gc.collect_periodic()
        if job.step_sync.keeps_ranks_together:
            job.timeouts.set_periodic()

        bus.trigger(EVENT_INFERENCE_STEP_POST, context)
        job.schedule.step()

    def _next_pack(self, packs: Iterator[MicrobatchPack[Any]]) -> MicrobatchPack[Any]:
        job = self._state
        pack = next(packs, None)
        job.step_sync.check_pack(0 if pack is None else len(pack), job.schedule.step_in_progress)
        if pack is None:
            raise RuntimeError(
                f"The data ended after step {job.schedule.current_step} of {job.schedule.total_steps}. Lower "
                f"schedule.total_steps, or leave it out to stop where the data ends."
            )
        return pack


class StepSync:
    """Knows how the ranks of a job wait for each other within a step.

    [Note: ranks of an inference job]
    FSDP gathers parameters for each microbatch, so ranks with different numbers of them would wait for ever: they compare
    the numbers before each step. Replicas exchange nothing, may have as many as they like, and drift apart. They meet at
    checkpoints and at the end only, where the limit for the collectives of a step would be too short.

    Args:
        dist_context: Topology of the job.
        modules: Stages of this rank.
    """

    def __init__(self, dist_context: DistributedContext, modules: Iterable[nn.Module]) -> None:
        is_sharded = any(fsdp_units(module) for module in modules)
        self._group = dist_context.data_group if is_sharded else None
        self._device = dist_context.current_device
        self._keeps_ranks_together = is_sharded or not dist_context.mesh_params.has_data_parallel_replicate

    @property
    def keeps_ranks_together(self) -> bool:
        """Whether no rank can be more than about a step ahead of another."""
        return self._keeps_ranks_together

    def check_pack(self, num_microbatches: int, step: int) -> None:
        """Compare the size of a pack with that of the other ranks. All ranks must call it; blocks where it compares.

        Args:
            num_microbatches: Microbatches of this rank; 0 if its data has ended.
            step: Number of the step, from 1.

        Raises:
            ValueError: On all ranks, if the sizes differ where they must not.
        """
        if self._group is None:
            return
        extremes = torch.tensor([num_microbatches, -num_microbatches], device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        largest, negated_smallest = extremes.tolist()
        if largest != -negated_smallest:
            raise ValueError(
                f"ranks have {-negated_smallest} to {largest} microbatches in step {step}, but FSDP gathers parameters "
                f"for each microbatch, so they would wait for ever. Give every rank as many, for example by padding, or "
                f"replicate the model."
            )
