"""D9DStrategy: a Lightning Trainer on the d9d engine."""
# Lightning shares these with its own strategies only
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.internals.nonfinite import OnNonfinite
from d9d.model_state.io.load import LoadMode
from d9d.model_state.io.save import BackgroundExport
from d9d.model_state.mapper import ModelStateMapper
from d9d.module.parallelism.plan import Parallelize, ParallelPlan
from d9d_lightning.checkpoints.restore import load_model_state, load_optimizer_states
from d9d_lightning.checkpoints.stage_optimizers import StageCut, check_optimizers, set_up_together
from d9d_lightning.checkpoints.store import CheckpointStore
from d9d_lightning.checkpoints.trainer_checks import plugin_problems
from d9d_lightning.checkpoints.whole import collect_model_state
from d9d_lightning.collectives import all_gather_stacked, decide_together, reduce_over
from d9d_lightning.gradients.loss_weights import with_announced_loss
from d9d_lightning.gradients.nonfinite import NonfiniteSteps
from d9d_lightning.gradients.precision import MeshClipping, NormScope, agree_on_scale, install_mesh_clipping
from d9d_lightning.jobs.failures import RunFailure
from d9d_lightning.jobs.launch import build_launcher, join_job, leave_job, tell_ranks
from d9d_lightning.jobs.process_launcher import HandBack, ProcessLauncher
from d9d_lightning.jobs.run_agreement import agree_on_run
from d9d_lightning.jobs.signals import give_exit_code
from d9d_lightning.model_states.module_states import ExportFormat, ModuleStates
from d9d_lightning.model_states.options import MapperSpec, ModelStateOptions
from d9d_lightning.options.config_check import LauncherName, read_or_note
from d9d_lightning.options.mesh import MeshOption, MeshSpec, replica_of
from d9d_lightning.options.schedule import ScheduleSpec
from d9d_lightning.options.strategy_options import StrategyOptions
from d9d_lightning.pipeline.cut import check_cut, cut_of, norm_scope_of
from d9d_lightning.pipeline.stages import PipelineStages
from d9d_lightning.placements.fsdp_steps import show_module_shards
from d9d_lightning.placements.module_setup import equalise_module, is_on_meta, set_up_module
from d9d_lightning.placements.parallelize import is_parallelized
from d9d_lightning.placements.tensor_parallel import share_random_state
from d9d_lightning.steps.empty_hooks import calls_module_only, has_empty_hooks
from d9d_lightning.steps.pack_optimization import check_steps
from d9d_lightning.trainer.refusals import check_callbacks
from d9d_lightning.trainer.run import TrainerRun
from d9d_lightning.trainer.summaries import keep_summaries

T = TypeVar("T")
_NOTHING = nullcontext()
_OF_A_RUN = ("_context", "_cut", "_run", "_failure")  # process groups and hooks of a running job


class D9DStrategy(ParallelStrategy):
    """Runs an unchanged LightningModule over the processes of a Trainer: replicated, sharded, split, in stages.

    ``Trainer(strategy=D9DStrategy(mesh={"data_parallel_shard": 4}), devices=4)``; under ``torchrun`` as well.
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
        init_timeout_s: float | None = None,
        launcher: LauncherName | None = None,
        source_checkpoint: str | Path | None = None,
        load_mapper: MapperSpec = None,
        export_mapper: MapperSpec = None,
        keep_initial: Sequence[str] = (),
        load_mode: LoadMode = "each",
        on_nonfinite: OnNonfinite = "ignore",
        max_restarts_without_progress: int = 3,
    ) -> None:
        """Describe the job; nothing is distributed yet.

        Args:
            mesh: Parallelism degrees. One may be -1 or "auto": what the others leave of the processes. None, "auto": replicas.
            parallelize: How to distribute the module. A function of (module, context) that does it; or patterns of
                submodule names (as of `fnmatch` for each part, so that "blocks.*" is each block) with words of
                `d9d.module.parallelism.plan` or torch's ``ParallelStyle`` objects, as a mapping or the path of a YAML file. The
                first match counts, once for data- and once for tensor-parallel ranks. Words that the mesh has no ranks for
                do nothing, so that one plan serves all meshes. None, and patterns without a word about data-parallel
                ranks: each repeated block, or else each submodule of `min_unit_params`, is an FSDP unit, as is the rest.
            pipeline_module: Dotted name of the submodule that is cut into stages. Nothing is cut if ``pipeline_parallel`` is 1.
            stages: How it is cut. None: an ``nn.Sequential``, into stages of about equally many parameters.
            schedule: Name of a pipeline schedule, its config from `d9d.pipelining.factory`, or the fields of that.
            microbatches: Parts that a batch is cut into. None: whole. A pipeline runs the batches of a window as one pack.
            bucket_size_mb: MiB of a gradient bucket of replicated parameters. Smaller ones overlap more, larger ones cost less.
            min_unit_params: Smallest FSDP unit of the default plan where no block repeats. Each costs Python time.
            mp_policy: FSDP's own mixed precision, for the default and the pattern plan. None: autocast, as ``precision`` says.
            reshard_after_forward: As of ``fully_shard``: frees what is gathered. None: except while batches accumulate.
            timeout_s: Time limit of collectives in seconds. None: 30 minutes.
            init_timeout_s: Their limit until the first step of a fit is done, where it compiles. None: `timeout_s`.
            launcher: How processes start that neither torchrun nor a cluster starts: "script" runs the script again, "fork" and
                "spawn" make children of this one, whose weights and metrics come back. None: "fork" in a notebook, else "script".
            source_checkpoint: Model state (a folder, or one file) that training starts from, loaded before a ``ckpt_path`` is.
            load_mapper: Makes the module's tensors from those of the source: a mapper, or a function that returns one for
                the LightningModule. Names are those of the whole module, also with stages. None: the same names.
            export_mapper: The way back, for `export_model_state`. None: the inverse of `load_mapper`; without it the same names.
            keep_initial: Patterns, as of `fnmatch`, of tensors that the source does not have, such as ``["head.*"]``.
            load_mode: "broadcast": of ranks that hold the same shard one reads, where storage is slower than the network.
            on_nonfinite: "skip" leaves out steps whose loss or gradient norm is not finite, "raise" ends the run before them.
            max_restarts_without_progress: Restarts by torchrun in a row that may resume from no newer checkpoint.

        Raises:
            ValueError: With all that is wrong, but for what the number of processes tells: that is said by the Trainer.
        """
        super().__init__()
        problems: list[str] = []
        fsdp = (min_unit_params, mp_policy, reshard_after_forward)
        self._options = StrategyOptions(
            mesh=read_or_note(problems, MeshOption.read, mesh),
            plan=read_or_note(problems, ParallelPlan.read, parallelize, *fsdp),
            pipeline_module=pipeline_module,
            stages=stages or PipelineStages(),
            schedule=schedule,
            microbatches=microbatches,
            bucket_size_mb=bucket_size_mb,
            timeout_s=timeout_s,
            init_timeout_s=init_timeout_s,
            launcher=launcher,
            on_nonfinite=on_nonfinite,
            max_restarts_without_progress=max_restarts_without_progress,
            model_states=ModelStateOptions.read(source_checkpoint, load_mapper, export_mapper, keep_initial, load_mode),
        )
        self._options.refuse_problems(problems)
        self._model_states = ModuleStates(self._options.model_states)
        self.num_nodes = 1
        """Number of machines; set by the Trainer."""
        self._context: DistributedContext | None = None
        self._cut: StageCut | None = None
        self._run: TrainerRun | None = None
        self._waiting_state: tuple[Mapping[str, Any], bool] | None = None
        self._clipping: MeshClipping | None = None
        self._failure: RunFailure | None = None
        self._checkpoints = CheckpointStore()
        self.nonfinite_steps = NonfiniteSteps(on_nonfinite)
        """Counts the steps that `on_nonfinite` has left out: ``num_skipped``."""
        self.last_grad_norm: torch.Tensor | None = None
        """Norm over all gradients before the last clipping by norm, a scalar on the device; None before the first."""

    @property
    def mesh(self) -> DeviceMeshParameters:
        """The parallelism degrees. Known once the Trainer is constructed."""
        mesh, devices = self._options.mesh, self.parallel_devices
        return mesh.fill(len(devices) * self.num_nodes) if devices else mesh.smallest

    @property
    def dist_context(self) -> DistributedContext:
        """The ranks of the job and the meshes over them.

        Raises:
            RuntimeError: On one process, which has none, and before the Trainer has started.
        """
        if self._context is None:
            raise RuntimeError("there is no distributed context: the job runs on one process, or has not started yet.")
        return self._context

    def explain(self, module: nn.Module | None = None) -> str:
        """Describe the mesh, how steps run, and where each parameter is: placements, type and bytes. No communication.

        Args:
            module: None for that of the Trainer. One that is not distributed yet is shown as it will be on rank 0.

        Raises:
            RuntimeError: If there is no module.
            ValueError: If the plan cannot be used on the module.
        """
        module = module or self._connected_module
        is_distributed = self._context is not None and is_parallelized(module, self._context)
        return self._options.explain(module, self.mesh, is_distributed=is_distributed)

    @property
    def is_distributed(self) -> bool:
        """Whether ranks read different samples, so that Lightning splits the data. Read before any group exists."""
        return self.mesh.data_parallel > 1

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError("the Trainer has not told the strategy its devices yet")
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.data_parallel, "rank": replica_of(self.mesh, self.global_rank)}

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if environment is None or self.parallel_devices is None:
            raise RuntimeError("the Trainer has not told the strategy its devices yet")
        options, num_devices = self._options, len(self.parallel_devices)
        options.refuse_processes(environment, num_devices, self.num_nodes, plugin_problems(self._checkpoint_io))
        if self.mesh.is_distributed:
            agree_on_scale(self.precision_plugin)
        hand_back = HandBack(self._collect_model_state, self._model_states.note_fit)
        self._launcher = build_launcher(self, options.launcher, num_devices, self.num_nodes, hand_back)

    def _collect_model_state(self) -> dict[str, Any]:
        return collect_model_state(self._connected_module, self._checkpoints, self._cut, self.broadcast)

    def __repr__(self) -> str:
        # Shown by Fabric and by a Trainer of the other Lightning, which refuse the strategy. [Note: two Lightnings]
        is_of_other = ParallelStrategy.__module__.startswith("pytorch_lightning")
        hint = "" if is_of_other else ", and pytorch_lightning takes that of d9d_lightning.pytorch_lightning"
        return f"{type(self).__name__} (for lightning.pytorch.Trainer; not for Fabric{hint})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a run: process groups stay in their process."""
        return vars(self) | dict.fromkeys(_OF_A_RUN) | {"_checkpoints": CheckpointStore()}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's logging the rank of this process."""
        if self.cluster_environment is not None:
            tell_ranks(self.cluster_environment, len(self.parallel_devices or ()), self.num_nodes)
        rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]  # Lightning's own way

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self.lightning_module is not None:
            check_callbacks(self.lightning_module.trainer, self.mesh, self.lightning_module)
            self._options.check_module(self.lightning_module, self.mesh)
        self._checkpoints.begin(self.root_device, self._checkpoint_io)
        if not self.mesh.is_distributed:
            leave_job()
            return
        reset_seed()
        if self.cluster_environment is None or self.parallel_devices is None:
            raise RuntimeError("the strategy is not connected to a Trainer")
        num_devices, first_s = len(self.parallel_devices), self._options.first_timeout_s(self.lightning_module)
        self._context = join_job(self.mesh, self.cluster_environment, num_devices, self.root_device, first_s)
        if self.lightning_module is not None:
            self._failure = RunFailure(self._context, self.lightning_module.trainer, self._options.timeout_s)
            agree_on_run(self._context, self.lightning_module.trainer, self._options)
            if is_overridden("configure_model", self.lightning_module):  # a module that holds groups cannot be copied
                self.lightning_module._device_mesh = self._context.mesh_for(DENSE_DOMAIN)
        self._checkpoints.join(self._context, self._failure)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._waiting_state = None
        # An earlier run may have cut it, and a checkpoint may be loaded before `setup`.
        self._cut = cut_of(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._connected_module
        if self.accelerator is None:
            raise RuntimeError("the strategy is not connected to a Trainer")
        self.accelerator.setup(trainer)
        self._checkpoints.check_agreement()
        is_fitting, has_pipeline = trainer.state.fn == TrainerFn.FITTING, self.mesh.has_pipeline_parallel
        check_steps(module, self._options.num_microbatches, has_pipeline=has_pipeline, is_fitting=is_fitting)
        if self._context is not None:
            share_random_state(self._context)
        options = self._options.pipeline(self.mesh)
        check_cut(module, self._context, options)
        self._model_states.prepare(module)
        if is_parallelized(module, self._context):
            equalise_module(module, self._context, self.root_device)
        else:
            if options is not None:
                keep_summaries(trainer, module)
            plan, precision, to_load = self._options.plan, self.precision_plugin, self._model_states.names_to_load
            set_up_module(module, self._context, self.root_device, plan, precision, self._layer_sync, options, to_load)
        # Again: a function of the user's may have made distributed parameters on any mesh.
        check_callbacks(trainer, self.mesh, module)
        self._cut = cut_of(module)
        self._model_states.load(module, self._context, self.root_device, self._cut)
        if self._waiting_state is not None:
            (state_dict, strict), self._waiting_state = self._waiting_state, None
            load_model_state(module, state_dict, strict=strict, cut=self._cut)
        self._run = TrainerRun(
            trainer,
            module,
            self._context,
            self.root_device,
            num_microbatches=self._options.num_microbatches,
            num_replicas=self.mesh.data_parallel,
            replica=replica_of(self.mesh, self.global_rank),
            own_backward=D9DStrategy.backward,
            note_loss=self.nonfinite_steps.note_loss,
        )
        if is_fitting:
            self._checkpoints.begin_fit(trainer, module, self._checkpoint_io)
            set_up_together(partial(self.setup_optimizers, trainer), self._cut)
            check_optimizers(module, self.optimizers, self._cut)
        self.setup_precision_plugin()
        if is_fitting:
            self._run.start_training(self.optimizers, self._lightning_optimizers, self._options)

    @property
    def _running(self) -> TrainerRun:
        if self._run is None:
            raise RuntimeError("the Trainer has not set the strategy up for a run")
        return self._run

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
        self._checkpoints.end()
        if self._failure is not None:
            self._failure.leave()
        if self._run is not None:
            self._run.end()
            self._run = None
        if self._context is None and not is_on_meta(self.lightning_module):
            super().teardown()
            return
        # Distributed parameters stay on their device, where the next run uses them. Those without memory can not move.
        for part in (self.precision_plugin, self.cluster_environment, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin
        if precision_plugin is not None:
            self._clipping = install_mesh_clipping(precision_plugin, self._keep_grad_norm, self.norm_scope)
            self.nonfinite_steps.install(precision_plugin, self._clipping)

    def _keep_grad_norm(self, norm: torch.Tensor) -> None:
        self.last_grad_norm = norm

    def measure_grad_norm(self, optimizer: Optimizer) -> None:
        """Set `last_grad_norm` to the norm over an optimizer's gradients, as they are now. All ranks must call it."""
        if self._clipping is not None:
            self._clipping.measure(optimizer)

    def norm_scope(self) -> NormScope:
        """Return what norms of gradients extend over on this rank, besides shards."""
        return norm_scope_of(self.lightning_module)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._connected_module if calls_module_only(self) else super()
        with _NOTHING if self._run is None else self._run.around_training_step():
            return with_announced_loss(inner.training_step(*args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate("validation_step", args, partial(super().validation_step, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate("test_step", args, partial(super().test_step, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate("predict_step", args, partial(super().predict_step, **kwargs))

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        module, plugin = self._connected_module, self.precision_plugin
        calls_hooks = not has_empty_hooks(module, plugin)
        loss = plugin.pre_backward(closure_loss, module) if calls_hooks else closure_loss
        with _NOTHING if self._run is None else self._run.around_backward(loss):
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        return plugin.post_backward(loss, module) if calls_hooks else loss.detach()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with _NOTHING if self._run is None else self._run.around_optimizer_step(), self.nonfinite_steps.leaving_out():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        with _NOTHING if self._run is None else self._run.block_sums():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._running.prepare_loader(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # `Any`: whatever the loader gives.
        if self._run is not None:
            self._run.check_batch(batch)
        self._checkpoints.raise_if_failed()
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        if self._run is not None:
            self._run.begin_training(self._checkpoints.restore_random_state)

    @override
    def on_validation_start(self) -> None:
        """Use the buffers of rank 0 everywhere, as DDP does."""
        if self._run is not None:
            self._run.start_evaluation()

    @override
    def on_validation_end(self) -> None:
        """Let ``parameters()`` show the shards again: without a backward pass FSDP leaves some gathered."""
        if self._run is not None:
            self._run.end_evaluation()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    @property
    def _is_alone(self) -> bool:
        return self._failure is not None and self._failure.is_alone  # See [Note: failing alone].

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, SIGTERMException):
            give_exit_code(exception)
            self._checkpoints.wait()
        self._checkpoints.abandon()
        if self._failure is not None:
            self._failure.end(exception)
        self._checkpoints.close_if_alone()

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
        """Reduce a tensor over the data-parallel ranks, all of which must call it; in evaluations, those that have the batch.

        Integers have a floating point mean. All else, and everything on one process, is returned as it is.
        """
        group = group or (None if self._context is None else self._context.replica_group)
        if self._context is None or group is None or not isinstance(tensor, torch.Tensor) or self._is_alone:
            return tensor
        reduce = reduce_over if self._run is None else self._run.reduce
        return reduce(tensor, group, "mean" if reduce_op is None else reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # Lightning's name
        is_own = self._context is None or self._is_alone
        return decision if is_own else decide_together(decision, self.root_device, of_all=all)

    @override
    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        group = group or dist.group.WORLD
        if self._context is None or group is None:
            return tensor
        gather = all_gather_stacked if self._run is None else self._run.all_gather
        return gather(tensor, group, has_gradient=sync_grads)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._failure is not None and self._failure.is_interrupted:
            # An exception leaves gathered what the step has gathered, on each rank something else.
            show_module_shards(self._connected_module)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object | None = None
    ) -> None:
        """Write a checkpoint that any mesh can load: a folder, complete or not there. All ranks must call it.

        Until here, `on_save_checkpoint` hooks see distributed tensors in ``checkpoint["state_dict"]``.
        """
        self._checkpoints.save(
            checkpoint, filepath, self._connected_module, self.optimizers, self._cut, storage_options
        )

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that any mesh has saved, or a file of plain Lightning. All ranks must call it."""
        return self._checkpoints.load(checkpoint_path, weights_only=weights_only)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint, behind the one that is being written. Files and other folders are left alone."""
        self._checkpoints.remove(filepath)

    def export_model_state(
        self,
        path: str | Path,
        mapper: ModelStateMapper | None = None,
        *,
        shard_size_gb: float = 4.0,
        dtype: torch.dtype | None = None,
        manifest: bool = False,
        show_progress: bool = False,
        in_background: bool = False,
    ) -> BackgroundExport | None:
        """Write the weights as .safetensors files for other tools, each tensor once. All ranks must call it; it blocks.

        During a run, and after one. Nothing is written, and None returned, where an exception on some ranks has ended the run.

        Args:
            path: Folder to write into, on a file system that all ranks share.
            mapper: Makes the exported tensors from those of the whole module. None: as `export_mapper` says.
            shard_size_gb: Largest size of a file in GB.
            dtype: What floating point tensors are converted to; None keeps each tensor's own.
            manifest: Whether to write hashes of the files too, which are verified when they are loaded.
            show_progress: Whether rank 0 shows a progress bar.
            in_background: Whether to return when the weights are copied; all ranks must ``wait()`` for the returned export.

        Raises:
            RuntimeError: If the job has several processes and none has started yet.
            ValueError: On all ranks, if the mapper does not fit the module, or there is none.
        """
        if self._context is None and self.mesh.is_distributed and not isinstance(self._launcher, ProcessLauncher):
            raise RuntimeError("export_model_state() needs the processes of the job: call it during or after a run.")
        if self._is_alone:
            return None
        form = ExportFormat(shard_size_gb, dtype, manifest, show_progress, in_background)
        return self._model_states.export(Path(path), self._connected_module, self._context, self._cut, mapper, form)

    def check_export(self) -> None:
        """Raise now, in a run, what `export_model_state` without a mapper would raise for the lack of one."""
        self._model_states.mapper_to_export(self._connected_module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._connected_module
        if is_on_meta(module) or self._model_states.is_to_load(module):
            # Until `setup` has loaded the source. Lightning's own way to load later forgets `weights_only`.
            self._waiting_state = checkpoint["state_dict"], strict
        else:
            load_model_state(module, checkpoint["state_dict"], strict=strict, cut=self._cut)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states, module = checkpoint["optimizer_states"], self._connected_module
        load_optimizer_states(states, self.optimizers, module=module, cut=self._cut, device=self.root_device)
