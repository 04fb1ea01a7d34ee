"""Build the model stages of this rank: on meta, parallelise, allocate local shards, initialise, load."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DistributedContext
from d9d.core.placement import trainable
from d9d.core.protocol import MixesTokens
from d9d.internals.materialize import materialize_module, seed_names_of_stages
from d9d.internals.model_states import failing_together, names_to_load
from d9d.internals.tied_parameters import StageMemory, agree_on_ties
from d9d.loop.component.model_states import load_and_tie_stages
from d9d.loop.component.tracked_modules import TrackedModules, everything, only_trainable
from d9d.loop.config import ModelStageFactoryConfig, PipeliningConfig
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
)
from d9d.pipelining.api import PipelineStageInfo
from d9d.pipelining.factory import PipelineScheduleInfo, build_schedule


class ModelStageFactory:
    """Builds the stages that this rank hosts, each in the order that keeps memory at the local shards."""

    def __init__(
        self,
        model_provider: ModelProvider[Any],
        dist_context: DistributedContext,
        config_model: ModelStageFactoryConfig,
        config_pipelining: PipeliningConfig,
        seed: int = 0,
    ) -> None:
        """Take the provider and the configs.

        Args:
            model_provider: Builds and distributes the model.
            dist_context: Topology of the job.
            config_model: Where weights come from, and which of them checkpoints hold.
            config_pipelining: How stages are scheduled.
            seed: Seed of the initial weights, which do not depend on the mesh.
        """
        self._provider = model_provider
        self._dist_context = dist_context
        self._config = config_model
        self._pipelining = config_pipelining
        self._seed = seed

    # Any: only the job knows the types of its inputs and outputs.
    def build_pipeline_and_modules(self) -> tuple[PipelineScheduleInfo[Any, Any, Any], TrackedModules]:
        """Build the stages and the schedule that runs them. All ranks must call it.

        Raises:
            ValueError: If stages share weights in a way that cannot be kept, see `agree_on_ties`; or if something is
                wrong with the source checkpoint or a mapper, see `load_and_tie_stages`.
            RuntimeError: If the provider fails on any rank of a pipeline: on all of them, with its error in words. A
                ValueError stays one, and so does an OSError. Without pipeline parallelism, errors are raised as they are.
        """
        context = self._dist_context
        stages: list[int] = []
        built: list[InitializeModelStageResult[Any]] = []
        memory = StageMemory()

        def build(stage: PipelineStageInfo) -> nn.Module:
            stages.append(stage.current_stage)
            built.append(self._build_on_meta(stage, memory))
            return built[-1].model

        schedule, modules = build_schedule(context, self._pipelining.schedule, build)
        ties = agree_on_ties(modules, stages, context, memory)
        seed_names: list[dict[str, str]] = [{} for _ in modules]
        if context.mesh_params.has_pipeline_parallel:
            seed_names = seed_names_of_stages(modules, stages, context.pipeline_group)
        has_source = self._config.source_checkpoint is not None
        for module, result, names in zip(modules, built, seed_names, strict=True):
            self._tell_of_shared_names(module, names)
            materialize_module(
                module,
                context.current_device,
                self._seed,
                group=context.data_group,
                seed_names=names,
                # Copies of a tied weight that are not loaded get their values from the first one.
                loaded=names_to_load(module, result.keep) if has_source else (),
            )
            module.train()
        tied = load_and_tie_stages(modules, built, ties, context, self._config)
        predicate = only_trainable if self._config.checkpoint_only_trainable_parameters else everything
        return schedule, TrackedModules(context, modules, predicate, tied)

    def _build_on_meta(self, stage: PipelineStageInfo, memory: StageMemory) -> InitializeModelStageResult[Any]:
        context = self._dist_context
        # What is wrong with one stage, other stages do not see: they would go on, and wait for its ranks in vain. Each half
        # ends together, so that ranks on which the first one fails are not waited for by any collective in the second.
        together = context if context.mesh_params.has_pipeline_parallel else None
        with failing_together(together), torch.device("meta"):
            built = self._provider.initialize_model_stage(
                InitializeModelStageContext(dist_context=context, stage=stage)
            )
        model = cast("nn.Module", built.model)
        # What stages share is refused by all ranks together, and may not be distributed twice until then.
        has_shared = memory.add(stage.current_stage, model)
        with failing_together(together):
            if context.is_distributed and not has_shared:
                self._provider.parallelize_model_stage(
                    ParallelizeModelStageContext(dist_context=context, stage=stage, model=model)
                )
                self._refuse_undistributed(model)
                self._refuse_attention_to_parts(model)
                memory.add(stage.current_stage, model)
        return built

    def _tell_of_shared_names(self, module: nn.Module, seed_names: Mapping[str, str]) -> None:
        with_parameters = [
            name for name in seed_names if next(module.get_submodule(name).parameters(recurse=False), None) is not None
        ]
        if with_parameters:
            self._dist_context.logger.info(
                "initial values depend on how the model is cut: a stage before has a module %s too. Name modules as in "
                "the whole model, for example by the number of the layer in it.",
                with_parameters[0] or "(its root) with parameters",
            )

    def _refuse_undistributed(self, model: nn.Module) -> None:
        """Refuse parameters whose gradients nobody would sum: their copies would drift apart in silence."""
        if self._dist_context.mesh_params.data_ranks == 1:
            return
        plain = {id(parameter) for parameter in trainable(model.parameters()) if not isinstance(parameter, DTensor)}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in plain]
        if names:
            raise ValueError(
                f"parallelize_model_stage() left {len(names)} trainable parameters undistributed, so that their copies "
                f"would drift apart: {', '.join(names)}. Call parallelize_replicate, parallelize_fsdp or "
                f"parallelize_hsdp on their modules."
            )

    def _refuse_attention_to_parts(self, model: nn.Module) -> None:
        """Refuse attention, and losses of routers, that take the tokens of this rank for whole sequences: wrong in silence."""
        degree = self._dist_context.mesh_params.context_parallel
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, MixesTokens) and module.context_parallel_degree not in (None, degree)
        ]
        if names:
            raise ValueError(
                f"sequences are cut over {degree} context-parallel ranks, but parallelize_model_stage() left {len(names)} "
                f"modules that would see, or count for router losses, the tokens of their own rank alone: {', '.join(names)}. "
                f"Call parallelize_context on the model, which says what can not be split, or set the degrees to 1."
            )
