"""D9DStrategy: a Lightning Trainer on the d9d engine."""
# Lightning shares these with its own strategies only
# pyright: reportPrivateUsage=false

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.core.mesh_groups import RankLayout
from d9d.core.placement import local_tensor
from d9d.optim.local_shards import localize_optimizer
from d9d_lightning.checkpoint import (
    StageCut,
    error_of,
    gather_checkpoint,
    load_model_state,
    load_optimizer_states,
)
from d9d_lightning.collectives import all_gather_stacked, reduce_over
from d9d_lightning.config_check import LauncherName, refuse_problems, strategy_problems
from d9d_lightning.explain import explain_module, steps_line
from d9d_lightning.failures import RunFailure
from d9d_lightning.fsdp_steps import FsdpSteps, show_module_shards
from d9d_lightning.gradients import DataParallelGradients
from d9d_lightning.launch import build_launcher, join_job, leave_job
from d9d_lightning.loss_weights import LossWeights
from d9d_lightning.mesh_option import MeshOption, MeshSpec
from d9d_lightning.metrics import install_metric_sync
from d9d_lightning.module_setup import ModelBuffers, is_on_meta, set_up_module
from d9d_lightning.pack_optimization import PackOptimization
from d9d_lightning.parallelize import (
    FlagFollower,
    data_parallel_groups,
    is_parallelized,
)
from d9d_lightning.pipeline_cut import PipelineOptions, pipeline_of
from d9d_lightning.pipeline_gradients import PipelineGradients
from d9d_lightning.pipeline_step import PipelineSteps, StepArguments
from d9d_lightning.plan import Parallelize, ParallelPlan, read_plan
from d9d_lightning.precision import MeshClipping, NormScope, install_mesh_clipping
from d9d_lightning.refusals import check_callbacks
from d9d_lightning.schedule_option import ScheduleSpec, schedule_config
from d9d_lightning.signals import AgreedSignals
from d9d_lightning.stages import PipelineStages
from d9d_lightning.summaries import install_summaries, keep_summaries, release_summaries
from d9d_lightning.tensor_parallel import share_random_state

T = TypeVar("T")

_OF_A_RUN = (
    "_context",
    "_cut",
    "_gradients",
    "_flags",
    "_fsdp",
    "_buffers",
    "_pipeline_steps",
    "_lightning_optimization",
    "_failure",
    "_signals",
)
"""Attributes that hold process groups and hooks of a running job."""


class D9DStrategy(ParallelStrategy):
    """Runs an unchanged LightningModule replicated, sharded, or both, over the processes of a Trainer.

    ``Trainer(strategy=D9DStrategy(mesh={"data_parallel_shard": 4}), devices=4)``; under ``torchrun`` as well. On one
    process it behaves as Lightning without a strategy.
    """

    strategy_name = "d9d"

    def __init__(
        self,
        mesh: MeshSpec = None,
        parallelize: Parallelize = None,
        *,
        pipeline_module: str | None = None,
        stages: PipelineStages | None = None,
        schedule: ScheduleSpec = "1f1b",
        microbatches: int | None = None,
        bucket_size_mb: int = 32,
        min_unit_params: int = 1_000_000,
        mp_policy: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        timeout_s: float | None = None,
        launcher: LauncherName | None = None,
    ) -> None:
        """Describe the job; nothing is distributed yet.

        Args:
            mesh: Parallelism degrees. One may be -1 or "auto": what the others leave of the Trainer's processes. None
                and "auto": as many replicas as the Trainer has processes.
            parallelize: How to distribute the module. A function of (module, context) that does it; or a mapping of
                name patterns (as of `fnmatch` for each part of a dotted submodule name, so that "blocks.*" is each
                block) to words, from Python or as the path of a YAML file. "replicate" and "shard" ("hsdp" is another
                word for it) are about the data-parallel ranks; what they leave is replicated. The others are about
                tensor parallelism, see `d9d_lightning.plan.LayerSplit`; torch's ``ParallelStyle`` objects may stand in
                their place. Of both kinds the first match counts. Words that the mesh has no ranks for do nothing, so
                that one plan serves all meshes. None, and a mapping without a word about data-parallel ranks: each
                repeated block, or else each submodule of `min_unit_params`, is an FSDP unit, and so is the rest;
                without shards in the mesh everything is replicated.
            pipeline_module: Dotted name of the submodule that is cut into stages, for ``pipeline_parallel`` > 1.
            stages: How it is cut; see `PipelineStages`. None: between the children of an ``nn.Sequential``, so that
                stages have about equally many parameters.
            schedule: Name of a pipeline schedule, its config from `d9d.pipelining.factory`, or the fields of that.
            microbatches: Number of microbatches that one batch is cut into. None leaves batches whole. In a pipeline the
                batches of an accumulation window run as one pack, so ``accumulate_grad_batches`` makes microbatches too.
            bucket_size_mb: Size of the gradient buckets of replicated parameters in MiB. Smaller ones overlap more of
                the sums with the backward pass, larger ones cost less per byte.
            min_unit_params: Smallest FSDP unit of the default plan where no block repeats. Each unit costs about half
                a millisecond of Python per step.
            mp_policy: FSDP's own mixed precision, for the default and the pattern plan. None: as Lightning's
                ``precision`` says, by autocast.
            reshard_after_forward: Whether FSDP frees gathered parameters after the forward pass; see ``fully_shard``.
                None: except while batches accumulate.
            timeout_s: Time limit of collectives in seconds. None: 30 minutes.
            launcher: How further processes start where no torchrun or cluster has started them: "script" runs the
                script again, "fork" and "spawn" make children of this process, whose weights and metrics come back.
                None: "fork" in a notebook, else "script".

        Raises:
            ValueError: For a malformed mesh. All else that is wrong is said when the Trainer is constructed.
        """
        super().__init__()
        self._mesh = MeshOption.read(mesh)
        self._pipeline_module, self._schedule, self._microbatches = pipeline_module, schedule, microbatches
        self._stages = stages or PipelineStages()
        self._launcher_name = launcher
        self._bucket_size_mb = bucket_size_mb
        fsdp_kwargs: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
        if mp_policy is not None:
            fsdp_kwargs["mp_policy"] = mp_policy
        self._plan = ParallelPlan(
            parallelize=read_plan(parallelize), min_unit_params=min_unit_params, fsdp_kwargs=fsdp_kwargs
        )
        self._stays_gathered = reshard_after_forward is None
        self._timeout_s = timeout_s
        self._num_nodes = 1
        self._context: DistributedContext | None = None
        self._cut: StageCut | None = None
        self._gradients: DataParallelGradients | None = None
        self._flags: FlagFollower | None = None
        self._fsdp: FsdpSteps | None = None
        self._restores_after_setup: bool | None = None
        self._buffers: ModelBuffers | None = None
        self._pipeline_steps: PipelineSteps | None = None
        self._lightning_optimization: _AutomaticOptimization | None = None
        self._correction: float | torch.Tensor = 1.0
        self._clipping: MeshClipping | None = None
        self._failure: RunFailure | None = None
        self._signals: AgreedSignals | None = None
        self.last_grad_norm: torch.Tensor | None = None
        """Norm over all gradients before the last clipping by norm, a scalar on the device; None before the first."""

    @property
    def mesh(self) -> DeviceMeshParameters:
        """The parallelism degrees. Known once the Trainer is constructed."""
        return self._mesh.fill(self._num_processes) if self.parallel_devices else self._mesh.smallest

    @property
    def _num_processes(self) -> int:
        return max(1, len(self.parallel_devices or ())) * self._num_nodes

    @property
    def dist_context(self) -> DistributedContext:
        """The ranks of the job and the meshes over them.

        Raises:
            RuntimeError: On one process, which has none, and before the Trainer has started.
        """
        if self._context is None:
            raise RuntimeError(
                "there is no distributed context: the job runs on one process, or has not started."
                if not self.mesh.is_distributed
                else "the distributed context exists from `setup` on; the Trainer has not started the job yet."
            )
        return self._context

    def explain(self, module: nn.Module | None = None) -> str:
        """Describe the mesh, how steps run, and where each parameter is: placements, type and bytes. No communication.

        Args:
            module: What to describe; None for the module of the Trainer. One that is not distributed yet is shown as it
                will be on rank 0.

        Raises:
            RuntimeError: If there is no module.
            ValueError: If the plan cannot be used on the module.
        """
        module = module or self._connected_module
        steps = steps_line(self.mesh, self._microbatches, str(self._schedule))
        is_distributed = self._context is not None and is_parallelized(module, self._context)
        return explain_module(module, self._plan, self.mesh, is_distributed=is_distributed, steps=steps)

    @property
    def is_distributed(self) -> bool:
        """Whether ranks read different samples, so that Lightning splits the data. Read before any group exists."""
        return self.mesh.data_parallel > 1

    @property
    def num_nodes(self) -> int:
        """Number of machines; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError("the Trainer has not told the strategy its devices yet")
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.data_parallel, "rank": self._dp_rank}

    @property
    def _dp_rank(self) -> int:
        # Arithmetic, as Lightning asks before any group exists.
        layout = RankLayout(shape=self.mesh.root_shape, rank=self.global_rank)
        return layout.coordinate("dp_replicate") * self.mesh.data_parallel_shard + layout.coordinate("dp_shard")

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if environment is None or self.parallel_devices is None:
            raise RuntimeError("the Trainer has not told the strategy its devices yet")
        num_devices = len(self.parallel_devices)
        problems = strategy_problems(
            self._mesh,
            environment,
            num_devices=num_devices,
            num_nodes=self._num_nodes,
            pipeline_module=self._pipeline_module,
            schedule=self._schedule,
            microbatches=self._microbatches,
            launcher=self._launcher_name,
        )
        refuse_problems(problems, self._mesh)
        self._launcher = build_launcher(
            self, self._launcher_name, num_devices, self._num_nodes, self._collect_model_state
        )

    def _collect_model_state(self) -> dict[str, Any]:
        state = {"state_dict": self._connected_module.state_dict()}
        if self._context is None:
            return state["state_dict"]
        return gather_checkpoint(state, keep=self.is_global_zero, cut=self._cut)["state_dict"]

    def __repr__(self) -> str:
        # Shown by a Trainer of the other Lightning when it refuses the strategy. See [Note: two Lightnings].
        is_of_other = ParallelStrategy.__module__.startswith("pytorch_lightning")
        hint = "" if is_of_other else " (pytorch_lightning takes that of the module d9d_lightning.pytorch_lightning)"
        return f"{type(self).__name__}{hint}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a run: process groups stay in their process."""
        return vars(self) | dict.fromkeys(_OF_A_RUN)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's logging the rank of this process."""
        environment = self.cluster_environment
        if environment is not None:
            num_devices = len(self.parallel_devices or ())
            environment.set_global_rank(environment.node_rank() * num_devices + environment.local_rank())
            environment.set_world_size(num_devices * self._num_nodes)
        rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]  # Lightning's own way

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self.lightning_module is not None:
            check_callbacks(self.lightning_module.trainer, self.mesh, self.lightning_module)
        if not self.mesh.is_distributed:
            leave_job()
            return
        reset_seed()
        if self.cluster_environment is None or self.parallel_devices is None:
            raise RuntimeError("the strategy is not connected to a Trainer")
        self._context = join_job(self.mesh, self.cluster_environment, len(self.parallel_devices), self.root_device)
        if self._timeout_s is not None:
            self._context.set_timeout(self._timeout_s)
        if self.lightning_module is not None:
            self._failure = RunFailure(self._context, self.lightning_module.trainer, self._timeout_s)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._restores_after_setup = None

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._connected_module
        if self.accelerator is None:
            raise RuntimeError("the strategy is not connected to a Trainer")
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._context is not None:
            share_random_state(self._context)
        if not is_parallelized(module, self._context):
            layer_sync = self._layer_sync if is_fitting else None
            if self._pipeline_options is not None:
                keep_summaries(trainer, module)
            set_up_module(
                module,
                self._context,
                self.root_device,
                self._plan,
                self.precision_plugin,
                layer_sync,
                self._pipeline_options,
            )
        self._set_up_steps(trainer, module)
        for loop in (
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
            trainer.fit_loop.epoch_loop.val_loop,
        ):
            # Parameters that FSDP gathers under inference mode could not be trained afterwards.
            loop.inference_mode = loop.inference_mode and self._context is None
        if self._context is not None:
            # Again: a function of the user's may have made distributed parameters on any mesh.
            check_callbacks(trainer, self.mesh, module)
            self._signals = AgreedSignals.install(trainer, self._context)
            install_summaries(trainer)
            install_metric_sync(module)
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            self._setup_training(module)

    @property
    def _pipeline_options(self) -> PipelineOptions | None:
        if not self.mesh.has_pipeline_parallel or self._pipeline_module is None:
            return None
        return PipelineOptions(
            module_name=self._pipeline_module, stages=self._stages, schedule=schedule_config(self._schedule)
        )

    def _set_up_steps(self, trainer: Trainer, module: LightningModule) -> None:
        """Let the steps of this run be packs. See [Note: three feeders]."""
        pipeline = pipeline_of(module)
        loss_weights = LossWeights(None if self._context is None else self._context.replica_group, self.root_device)
        self._cut = None if pipeline is None else pipeline.cut
        if pipeline is not None:
            self._pipeline_steps = PipelineSteps(
                trainer,
                module,
                pipeline,
                num_microbatches=self._microbatches or 1,
                loss_weights=loss_weights,
                seed=self._step_seed(),
            )
        loop = trainer.fit_loop.epoch_loop
        self._lightning_optimization = loop.automatic_optimization
        loop.automatic_optimization = PackOptimization(
            trainer,
            module,
            num_microbatches=self._microbatches or 1,
            pipeline=self._pipeline_steps,
            loss_weights=loss_weights,
            num_replicas=self.mesh.data_parallel,
            correct_gradients=self._correcting_gradients,
        )

    def _step_seed(self) -> int:
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
        return self.broadcast(seed) + self._dp_rank

    @contextmanager
    def _correcting_gradients(self, factor: float | torch.Tensor) -> Generator[None]:
        self._correction = factor
        yield
        self._correction = 1.0

    def _setup_training(self, module: LightningModule) -> None:
        _optimizers_to_device(self.optimizers, self.root_device)
        if self._context is None:
            return
        pipeline = pipeline_of(module)
        if pipeline is not None and self._pipeline_steps is not None:
            for optimizer in self.optimizers:
                localize_optimizer(optimizer)
            self._buffers = ModelBuffers(module)
            gradients = PipelineGradients(
                pipeline.stages,
                pipeline.outside(module),
                data_groups=data_parallel_groups(self._context),
                pipeline_group=pipeline.group,
                bucket_size_mb=self._bucket_size_mb,
            )
            self._pipeline_steps.start_training(gradients, self.mesh.data_parallel)
            return
        for optimizer in self.optimizers:
            localize_optimizer(optimizer)
        self._flags = FlagFollower(module, module)
        self._fsdp = FsdpSteps(module, self.optimizers, is_manual=not module.automatic_optimization)
        self._buffers = ModelBuffers(module)
        self._gradients = DataParallelGradients(
            module,
            self.optimizers,
            data_groups=data_parallel_groups(self._context),
            bucket_size_mb=self._bucket_size_mb,
            device=self.root_device,
            stays_gathered=self._stays_gathered,
        )
        if len(self.optimizers) == 1:
            for optimizer in (*self.optimizers, *self._lightning_optimizers):
                self._gradients.follow_zero_grad(optimizer)

    @property
    def _connected_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("no LightningModule is connected to the strategy")
        return self.lightning_module

    @override
    def model_to_device(self) -> None:
        self._connected_module.to(self.root_device)

    @override
    def teardown(self) -> None:
        if self._gradients is not None and self._fsdp is not None:
            self._gradients.release()
            self._fsdp.release()
        self._gradients = self._fsdp = self._flags = None
        if self._pipeline_steps is not None:
            self._pipeline_steps.release()
            self._pipeline_steps = None
        if self._lightning_optimization is not None and self.lightning_module is not None:
            self.lightning_module.trainer.fit_loop.epoch_loop.automatic_optimization = self._lightning_optimization
            self._lightning_optimization = None
        if self._signals is not None:
            release_summaries(self._signals.trainer)
            self._signals.release()
            self._signals = None
        if self._context is None:
            super().teardown()
            return
        # Distributed parameters stay on their device: the next run uses them there.
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin
        if precision_plugin is not None:
            self._clipping = install_mesh_clipping(
                precision_plugin, self.mesh, self._keep_grad_norm, self.norm_scope
            )

    def _keep_grad_norm(self, norm: torch.Tensor) -> None:
        self.last_grad_norm = norm

    def measure_grad_norm(self, optimizer: Optimizer) -> None:
        """Set `last_grad_norm` to the norm over an optimizer's gradients, as they are now. All ranks must call it."""
        if self._clipping is not None:
            self._clipping.measure(optimizer)

    def norm_scope(self) -> NormScope:
        """Return what norms of gradients extend over on this rank, besides shards."""
        pipeline = pipeline_of(self._connected_module)
        if pipeline is None or self._context is None:
            return NormScope()
        is_first = pipeline.group.rank() == 0
        outside = () if is_first else pipeline.outside(self._connected_module)
        return NormScope(pipeline=self._context.mesh_for(DENSE_DOMAIN)["pp"], uncounted=frozenset(outside))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._flags is None or self._fsdp is None:
            return super().training_step(*args, **kwargs)
        self._flags.follow()
        self._share_buffers()
        self._fsdp.enter_step()
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._fsdp.leave_step()

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        module = self._connected_module
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._gradients is None or self._fsdp is None:
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            self._correct_gradients(module)
            return self.precision_plugin.post_backward(loss, module)
        self._gradients.before_backward()
        self._fsdp.before_backward(loss)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        # Before on_after_backward, which post_backward calls: hooks see the mean over all ranks.
        self._gradients.after_backward()
        self._correct_gradients(module)
        return self.precision_plugin.post_backward(loss, module)

    def _correct_gradients(self, module: nn.Module) -> None:
        """Take the mean over the batches that were there in place of those that were expected."""
        if isinstance(self._correction, float) and self._correction == 1.0:
            return
        gradients = [local_tensor(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._correction)  # pyright: ignore[reportPrivateImportUsage]

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline_steps is None:
            return super().validation_step(*args, **kwargs)
        return self._pipeline_steps.evaluate("validation_step", StepArguments(args[0], args[1:]))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline_steps is None:
            return super().test_step(*args, **kwargs)
        return self._pipeline_steps.evaluate("test_step", StepArguments(args[0], args[1:]))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline_steps is None:
            return super().predict_step(*args, **kwargs)
        return self._pipeline_steps.evaluate("predict_step", StepArguments(args[0], args[1:]))

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._fsdp is not None:
            self._fsdp.before_optimizer()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._pipeline_steps is not None:
            self._pipeline_steps.free_gathered()
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        if self._gradients is None:
            yield
            return
        with self._gradients.block_sums():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Lightning would seed by the global rank; ranks that read the same samples must augment them alike.
        _auto_add_worker_init_fn(dataloader, self._dp_rank)
        return dataloader

    @override
    def on_train_start(self) -> None:
        self._sync_new_metrics()

    @override
    def on_validation_start(self) -> None:
        """Use the buffers of rank 0 everywhere, as DDP does."""
        self._sync_new_metrics()
        if self._context is not None and self._buffers is not None:
            self._buffers.take_from_first(self._context.data_group)

    def _share_buffers(self) -> None:
        """Use the buffers of rank 0 in the first step of an accumulation window, as DDP does."""
        if self._context is None or self._buffers is None or self._gradients is None:
            return
        if self._gradients.begins_window:
            self._buffers.take_from_first(self._context.data_group)
        self._buffers.note_step()

    @override
    def on_validation_end(self) -> None:
        """Let ``parameters()`` show the shards again: without a backward pass FSDP leaves some gathered."""
        if self._context is not None:
            show_module_shards(self._connected_module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def _sync_new_metrics(self) -> None:
        if self._context is not None:
            install_metric_sync(self._connected_module)

    @property
    def _is_alone(self) -> bool:
        """Whether this rank has raised, and others have not: see [Note: failing alone]."""
        return self._failure is not None and self._failure.is_alone

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._failure is not None:
            self._failure.end(exception)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._context is not None and not self._is_alone:
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._context is None or self._is_alone:
            return obj
        objects: list[T] = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(
        self,
        tensor: Any,  # Lightning passes whatever was logged
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp.RedOpType | str | None = "mean",
    ) -> Any:
        """Reduce a tensor over the data-parallel ranks, into a new one; integers have a floating point mean.

        All ranks of the group must call it. Anything but a tensor is returned as it is, as is every tensor on one
        process and before the job has started.
        """
        group = group or (None if self._context is None else self._context.data_group)
        if self._context is None or group is None or not isinstance(tensor, torch.Tensor) or self._is_alone:
            return tensor
        return reduce_over(tensor, group, "mean" if reduce_op is None else reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # Lightning's name
        if self._context is None or self._is_alone:
            return decision
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    @override
    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        group = group or dist.group.WORLD
        if self._context is None or group is None:
            return tensor
        return all_gather_stacked(tensor, group, has_gradient=sync_grads)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._failure is not None and self._failure.is_interrupted:
            # An exception leaves gathered what the step has gathered, on each rank something else.
            show_module_shards(self._connected_module)
        return super().lightning_module_state_dict()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Before, where possible: plain tensors load as ever, and Lightning forgets `weights_only` otherwise.
        if self._restores_after_setup is None:
            self._restores_after_setup = is_on_meta(self._connected_module)
        return self._restores_after_setup

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object | None = None
    ) -> None:
        """Write a checkpoint with full tensors, the same on every mesh. All ranks must call it.

        Until here, `on_save_checkpoint` hooks see distributed tensors in ``checkpoint["state_dict"]``.

        Raises:
            RuntimeError: On all ranks, if rank 0 could not write.
        """
        if self._context is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._is_alone:
            return
        try:
            full = gather_checkpoint(
                checkpoint,
                keep=self.is_global_zero,
                module=self._connected_module,
                optimizers=self.optimizers,
                cut=self._cut,
            )
        except RuntimeError as error:
            if self._failure is None or not self._failure.is_interrupted:
                raise
            # What has interrupted the run must not be hidden by this.
            self._failure.give_up(error)
            return
        save = partial(self.checkpoint_io.save_checkpoint, full, filepath, storage_options=storage_options)
        failure = error_of(save) if self.is_global_zero else None
        reason = self.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if reason is not None:
            raise RuntimeError(f"rank 0 could not write the checkpoint {filepath}: {reason}") from failure

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_model_state(self._connected_module, checkpoint["state_dict"], strict=strict, cut=self._cut)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_optimizer_states(
            checkpoint["optimizer_states"], self.optimizers, module=self._connected_module, cut=self._cut
        )
        _optimizers_to_device(self.optimizers, self.root_device)
