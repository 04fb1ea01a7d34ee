"""What the strategy keeps for one run of the Trainer: how steps run, and where their gradients and buffers go."""
# Lightning shares these with its own strategies only
# pyright: reportPrivateUsage=false

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from d9d.core.dist_context import DistributedContext
from d9d.core.fsdp_internals import fsdp_units, keep_gathered
from d9d.core.placement import local_tensor
from d9d.optim.local_shards import localize_optimizer
from d9d_lightning.checkpoints.added_groups import restore_added_groups
from d9d_lightning.checkpoints.restarts import count_fit, end_count
from d9d_lightning.collectives import all_gather_stacked, reduce_over
from d9d_lightning.data.loader_states import draw_order_again, load_waiting_states
from d9d_lightning.data.loaders import agree_on_batches, prepare_loader
from d9d_lightning.data.uneven_batches import UnevenBatches
from d9d_lightning.gradients.data_parallel import DataParallelGradients
from d9d_lightning.gradients.loss_weights import LossWeights
from d9d_lightning.jobs.batch_agreement import BatchAgreement
from d9d_lightning.jobs.signals import AgreedSignals
from d9d_lightning.logs.advice import silence_sync_advice
from d9d_lightning.logs.agreement import LogAgreement
from d9d_lightning.metrics.install import install_metric_sync
from d9d_lightning.metrics.step_calls import follow_metrics, release_metrics
from d9d_lightning.options.strategy_options import StrategyOptions
from d9d_lightning.pipeline.cut import pipeline_of
from d9d_lightning.pipeline.gradients import PipelineGradients
from d9d_lightning.pipeline.step import PipelineSteps, StepArguments
from d9d_lightning.placements.fsdp_steps import FsdpSteps, show_module_shards
from d9d_lightning.placements.module_agreement import agree_on_optimizers
from d9d_lightning.placements.module_setup import ModelBuffers
from d9d_lightning.placements.parallelize import FlagFollower, data_parallel_groups
from d9d_lightning.steps.pack_optimization import PackOptimization, check_pipeline_optimizers
from d9d_lightning.trainer.summaries import install_summaries, release_summaries

__all__ = ["TrainerRun"]

_NOTHING = nullcontext()


class TrainerRun:
    """Runs the steps of a LightningModule in one run of the Trainer, such as a fit or a test.

    What trains is `DataParallelGradients` with `FsdpSteps`, or `PipelineSteps`, or on one process neither.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        context: DistributedContext | None,
        device: torch.device,
        *,
        num_microbatches: int,
        num_replicas: int,
        replica: int,
        own_backward: object,
        note_loss: Callable[[torch.Tensor], None],
    ) -> None:
        """Let steps be packs. See [Note: three feeders]. All ranks must call it.

        Args:
            trainer: Runs the loops.
            module: The LightningModule, distributed.
            context: Ranks of the job; None on one process.
            device: Device of this rank.
            num_microbatches: Parts that each batch is cut into.
            num_replicas: Number of data-parallel ranks.
            replica: Index of this rank among them.
            own_backward: `D9DStrategy.backward`, which a subclass may have replaced.
            note_loss: Is told each loss that a backward pass starts from, and in pipelines that of each step.
        """
        self._trainer = trainer
        self._module = module
        self._context = context
        self._device = device
        self._num_replicas = num_replicas
        self._replica = replica
        self._num_microbatches = num_microbatches
        self._note_loss = note_loss
        self._buffers: ModelBuffers | None = None
        self._gradients: DataParallelGradients | None = None
        self._flags: FlagFollower | None = None
        self._fsdp: FsdpSteps | None = None
        self._step_timeout_s: float | None = None
        self._free_shards: Callable[[], None] | None = None
        self._uneven_batches: UnevenBatches | None = None
        self._correction: float | torch.Tensor = 1.0
        self._batches = None if context is None else BatchAgreement(context)
        group = None if context is None else context.replica_group
        self._logs = None if group is None else LogAgreement(trainer, group)
        loss_weights = LossWeights(None if context is None else context.replica_group, device)
        pipeline = pipeline_of(module)
        self._pipeline_steps = None
        if pipeline is not None:
            self._pipeline_steps = PipelineSteps(
                trainer,
                module,
                pipeline,
                num_microbatches=num_microbatches,
                loss_weights=loss_weights,
                seed=_agreed_seed() + replica,
                end_step=self._end_step,
            )
        # Behind the pipeline, which says who updates metrics.
        self.sync_new_metrics()
        loop = trainer.fit_loop.epoch_loop
        self._lightning_optimization = loop.automatic_optimization
        loop.automatic_optimization = PackOptimization(
            trainer,
            module,
            num_microbatches=num_microbatches,
            pipeline=self._pipeline_steps,
            loss_weights=loss_weights,
            num_replicas=num_replicas,
            block_sums=self.block_sums,
            correct_gradients=self._correcting_gradients,
            apply_correction=self._correct_gradients,
            around_backward=self.around_backward,
            own_backward=own_backward,
            note_loss=note_loss,
            end_step=self._end_step,
        )
        # Last: what fails above leaves the Trainer as it was.
        self._signals = AgreedSignals.install(trainer, context)
        self._restore_advice: Callable[[], None] | None = None
        if self._logs is not None:
            self._logs.install()
        if context is not None:
            install_summaries(trainer)
            _evaluate_without_inference_mode(trainer)
            if num_replicas == 1:
                self._restore_advice = silence_sync_advice()

    def start_training(
        self,
        optimizers: Sequence[Optimizer],
        lightning_optimizers: Sequence[LightningOptimizer],
        options: StrategyOptions,
    ) -> None:
        """Begin a fit: on several ranks, take over gradients and buffers. All ranks must call it.

        Args:
            optimizers: Of the module; their states go to the device.
            lightning_optimizers: Lightning's wrappers around them.
            options: Of the strategy.

        Raises:
            RuntimeError: If torchrun has restarted the job too often without progress.
            ValueError: On all ranks, if they have different optimizers.
        """
        _optimizers_to_device(optimizers, self._device)
        count_fit(self._trainer, self._context, options.max_restarts_without_progress)
        restore_added_groups(self._trainer, self._module, optimizers)
        if self._context is None:
            return
        self._step_timeout_s = None if options.init_timeout_s is None else options.timeout_s
        agree_on_optimizers(self._module, optimizers, self._context, is_cut=pipeline_of(self._module) is not None)
        module, data_groups = self._module, data_parallel_groups(self._context)
        self._buffers = ModelBuffers(module)
        if self._pipeline_steps is not None:
            check_pipeline_optimizers(optimizers)
        for optimizer in optimizers:
            localize_optimizer(optimizer)
        pipeline = pipeline_of(module)
        if pipeline is not None and self._pipeline_steps is not None:
            gradients = PipelineGradients(
                pipeline.stages,
                pipeline.outside(module),
                data_groups=data_groups,
                pipeline_group=pipeline.group,
                bucket_size_mb=options.bucket_size_mb,
            )
            self._pipeline_steps.start_training(gradients, self._num_replicas)
            return
        self._flags = FlagFollower(module, module)
        self._fsdp = FsdpSteps(module, optimizers, is_manual=not module.automatic_optimization)
        self._gradients = DataParallelGradients(
            module,
            optimizers,
            data_groups=data_groups,
            bucket_size_mb=options.bucket_size_mb,
            device=self._device,
            stays_gathered=options.plan.stays_gathered,
        )
        if self._num_microbatches > 1 and options.plan.stays_gathered:
            # A short batch may have one microbatch on some ranks only, and each gathering is a collective.
            self._gradients.keep_gathered()
        if len(optimizers) == 1:
            for optimizer in (*optimizers, *lightning_optimizers):
                self._gradients.follow_zero_grad(optimizer)

    def prepare_loader(self, loader: object) -> object:
        """Return the loader that Lightning shall read in place of another one. All ranks must call it."""
        return prepare_loader(loader, self._trainer, self._context, num_ranks=self._num_replicas, rank=self._replica)

    def begin_training(self, restore_random_state: Callable[[], bool]) -> None:
        """Prepare for the first batch of a fit: Lightning has read a checkpoint and the loaders, and hooks have run.

        All ranks must call it.

        Args:
            restore_random_state: Lets random numbers go on as they would have behind the checkpoint, if it can.

        Raises:
            ValueError: On all ranks, if some would be through with the epoch before others.
        """
        agree_on_batches(self._trainer, self._context)
        self.sync_new_metrics()
        load_waiting_states(self._trainer)
        if restore_random_state():
            draw_order_again(self._trainer)

    def end(self) -> None:
        """Free gradients and hooks, and give the Trainer back what was exchanged."""
        if self._gradients is not None and self._fsdp is not None:
            self._gradients.release()
            self._fsdp.release()
        if self._pipeline_steps is not None:
            self._pipeline_steps.release()
        self._trainer.fit_loop.epoch_loop.automatic_optimization = self._lightning_optimization
        if self._context is not None:
            release_summaries(self._trainer)
        release_metrics(self._module)
        if self._logs is not None:
            self._logs.release()
        if self._restore_advice is not None:
            self._restore_advice()
        self._signals.release()
        end_count(self._trainer, self._context)

    # Training

    def around_training_step(self) -> AbstractContextManager[None]:
        """Prepare for a training step that is not one of a pipeline."""
        if self._flags is None or self._fsdp is None:
            return _NOTHING
        return self._entering_step(self._flags, self._fsdp)

    @contextmanager
    def _entering_step(self, flags: FlagFollower, fsdp: FsdpSteps) -> Generator[None]:
        flags.follow()
        if self._gradients is not None and self._gradients.begins_window:
            self._take_buffers()
        self._note_step()
        with fsdp.inside_step():
            yield
            if not self._module.automatic_optimization:
                # Its optimizers may be stepped past Lightning.
                self._end_first_limit()
        if self._num_microbatches == 1 or not self._module.automatic_optimization:
            self._end_step()

    def _end_step(self) -> None:
        """Compare what a step has logged, behind the last microbatch of its batch, where all ranks have such a batch."""
        if self._logs is not None and (self._uneven_batches is None or not self._uneven_batches.may_lack_ranks):
            self._logs.end_step()

    def around_backward(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Leave the gradients as hooks expect them: the mean over all ranks and, behind the last pass, the window."""
        self._note_loss(loss)
        if self._logs is not None and not self._module.automatic_optimization:
            self._logs.before_backward()
        is_plain = self._gradients is None and isinstance(self._correction, float) and self._correction == 1.0
        return _NOTHING if is_plain else self._finishing_gradients(loss)

    @contextmanager
    def _finishing_gradients(self, loss: torch.Tensor) -> Generator[None]:
        if self._gradients is not None and self._fsdp is not None:
            self._gradients.before_backward()
            self._fsdp.before_backward(loss)
        yield
        if self._gradients is not None:
            self._gradients.after_backward()
        self._correct_gradients()

    def block_sums(self) -> AbstractContextManager[None]:
        """Let backward passes inside only accumulate."""
        return _NOTHING if self._gradients is None else self._gradients.block_sums()

    @contextmanager
    def around_optimizer_step(self) -> Generator[None]:
        """Let hooks and the optimizer see shards. The pack of a pipeline runs inside."""
        if self._fsdp is not None:
            self._fsdp.before_optimizer()
        if self._pipeline_steps is not None:
            self._take_buffers()
            self._note_step()
        yield
        if self._pipeline_steps is not None:
            self._pipeline_steps.free_gathered()
        if self._module.automatic_optimization:
            self._end_first_limit()

    def _end_first_limit(self) -> None:
        """Let collectives have the limit of steps, behind the first step of a fit. All ranks must call it."""
        if self._step_timeout_s is not None and self._context is not None:
            limit_s, self._step_timeout_s = self._step_timeout_s, None
            self._context.set_timeout(limit_s)

    @contextmanager
    def _correcting_gradients(self, factor: float | torch.Tensor) -> Generator[None]:
        self._correction = factor
        yield
        self._correction = 1.0

    def _correct_gradients(self) -> None:
        """Take the mean over what was there in place of what was expected."""
        if isinstance(self._correction, float) and self._correction == 1.0:
            return
        parameters = self._module.parameters()
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._correction)  # pyright: ignore[reportPrivateImportUsage]

    # Evaluation

    def check_batch(self, batch: object) -> None:
        """Compare the first batch of each stage of the Trainer over the ranks that work on it together."""
        stage = self._trainer.state.stage
        if self._context is not None and stage is not None:
            activity = self._context.activity
            activity.step, activity.place = self._trainer.global_step + 1, f"a batch of the {stage.value} loop"
        if self._batches is not None and stage is not None:
            self._batches.check(batch, stage)

    def evaluate(self, name: str, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:  # noqa: ANN401
        """Run a step of validation, test or prediction.

        Args:
            name: Name of the step.
            args: What it is called with, the batch first.
            run: Runs it on this rank, without a pipeline.
        """
        if self._pipeline_steps is not None:
            return self._pipeline_steps.evaluate(name, StepArguments(args[0], args[1:]))
        output = run(*args)
        self._end_step()
        return output

    def sync_new_metrics(self) -> None:
        """Let metrics that were made since gather over the mesh, and microbatches. No communication."""
        if self._context is not None:
            install_metric_sync(self._module)
        if self._num_microbatches > 1 or self._pipeline_steps is not None:
            follow_metrics(self._module)

    def start_evaluation(self) -> None:
        """Use the buffers of the first replica everywhere, as DDP does. All ranks must call it."""
        self.sync_new_metrics()
        self._take_buffers()
        self._allow_uneven_batches()

    def _allow_uneven_batches(self) -> None:
        """Let ranks have different numbers of batches; see [Note: equally many batches] for when they have.

        Each gathering of a shard is a collective. So where numbers differ, shards are gathered for the first batch and
        stay so to the end. A rank without any batch does not come here: Lightning skips the loop there.
        """
        context, units = self._context, fsdp_units(self._module)
        may_lack_ranks = self._trainer.predicting and not units
        if context is None or context.replica_group is None or may_lack_ranks:
            return
        self._uneven_batches = UnevenBatches(self._trainer, context.replica_group)
        if units and self._uneven_batches.are_uneven:
            self._free_shards = keep_gathered(units)

    def reduce(
        self, tensor: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType | str
    ) -> torch.Tensor:
        """Reduce over a group, or over those of its ranks that have the batch that is evaluated now. See `reduce_over`.

        Raises:
            RuntimeError: Ranks have different numbers of batches, and the group is not that of the data-parallel ranks.
            ValueError: On all ranks, if they have logged different keys; see [Note: who logs what].
        """
        peers = None
        if self._context is not None and self._uneven_batches is not None:
            if group is not self._context.replica_group:
                self._uneven_batches.refuse("sync_dist_group")
            peers = self._uneven_batches.peers()
        if self._logs is not None and self._context is not None and group is self._context.replica_group:
            self._logs.before_reduction()
        return reduce_over(tensor, group, operation, peers)

    def all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup, *, has_gradient: bool) -> torch.Tensor:
        """Gather from all ranks of a group; see `all_gather_stacked`.

        Raises:
            RuntimeError: In a batch of an evaluation, if ranks have different numbers of them.
        """
        if self._uneven_batches is not None:
            self._uneven_batches.refuse("all_gather")
        return all_gather_stacked(tensor, group, has_gradient=has_gradient)

    def end_evaluation(self) -> None:
        """Let ``parameters()`` show the shards again: without a backward pass FSDP leaves some gathered."""
        self._uneven_batches = None
        if self._free_shards is not None:
            self._free_shards()
            self._free_shards = None
        if self._pipeline_steps is not None:
            self._pipeline_steps.end_evaluation()
        elif self._context is not None:
            show_module_shards(self._module)

    # Buffers

    def _take_buffers(self) -> None:
        if self._buffers is not None and self._context is not None:
            self._buffers.take_from_first(self._context.replica_group)

    def _note_step(self) -> None:
        if self._buffers is not None:
            self._buffers.note_step()


def _evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Let evaluation run under ``no_grad``: what FSDP gathers under inference mode could not be trained afterwards."""
    for loop in (
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
        trainer.fit_loop.epoch_loop.val_loop,
    ):
        loop.inference_mode = False


def _agreed_seed() -> int:
    """Return a number that all ranks have in common. All ranks must call it."""
    seeds = [int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))]
    dist.broadcast_object_list(seeds, src=0)
    return seeds[0]
