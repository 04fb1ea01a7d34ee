"""Load the stages of this rank from a model state, and export them to one."""

import fnmatch
import glob
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from d9d.core.dist_context import REGULAR_DOMAIN, DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import local_tensor
from d9d.internals.broadcast import broadcast_packed
from d9d.internals.model_states import failing_together, huggingface_cache_root
from d9d.internals.tied_parameters import Tie, TiedParameters, tie_parameters
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.config import ModelStageFactoryConfig
from d9d.loop.control import InitializeModelStageResult, ModelProvider, PrepareExportModelStageContext
from d9d.model_state.io.load import load_model_state
from d9d.model_state.io.save import BackgroundExport, save_model_state, save_model_state_pipeline_parallel
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSelectGroups
from d9d.model_state.mapper.names import NearestNames, listed

__all__ = ["ModelStageExporter", "load_and_tie_stages"]


def load_and_tie_stages(
    modules: Sequence[nn.Module],
    # Any: only the job knows the types of its stages.
    built: Sequence[InitializeModelStageResult[Any]],
    ties: Sequence[Tie],
    context: DistributedContext,
    config: ModelStageFactoryConfig,
) -> TiedParameters:
    """Load the stages of this rank, and give all copies of a tied weight one value. All ranks must call it.

    Each stage is loaded through its own mapper. Of a weight that several stages have, the lowest one must get its copy
    from the model state. The others may get theirs too, and it must be the same then.

    Args:
        modules: Stages of this rank, with memory and first values.
        built: What the model provider has returned for each of them.
        ties: From `agree_on_ties`.
        context: Topology of the job.
        config: Names the model state; without one the first values stay.

    Raises:
        ValueError: On all ranks, if something is wrong with the model state, a mapper, or the copies of a tied weight.
    """
    source = config.source_checkpoint
    if source is None:
        return tie_parameters(modules, ties, context)
    further = [_further_copies(stage, module, ties) for stage, module in enumerate(modules)]
    whole = _whole_of(modules, built, context)
    with failing_together(context):
        prepared = [
            _Loading(module, _mapper_of(module, result), _kept(module, result.keep, whole.names), copies)
            for module, result, copies in zip(modules, built, further, strict=True)
        ]
    for loading in prepared:
        # All ranks have the same number of stages, and fail together at each.
        load_model_state(
            source,
            loading.mapper,
            str(context.current_device),
            loading.module,
            load_mode=config.load_mode if context.is_distributed else "each",
            keep=[*loading.kept, *(glob.escape(name) for name in loading.copies - loading.produced)],
            expected=whole.read,
            process_group=context.groups[0] if context.is_distributed else None,
            cache_root=huggingface_cache_root(source),
        )
    loaded = [
        (name, parameter, local_tensor(parameter).detach().clone())
        for loading in prepared
        for name, parameter in loading.module.named_parameters(remove_duplicate=False)
        if name in loading.copies & loading.produced
    ]
    tied = tie_parameters(modules, ties, context)
    with failing_together(context):
        different = [name for name, copy, own in loaded if not torch.equal(local_tensor(copy).detach(), own)]
        if different:
            raise ValueError(
                f"the model state {source} has other values for {listed(different)} than for the copy of the same weight "
                f"in an earlier stage. Load both from one tensor, or do not tie them (tied_parameters())."
            )
    return tied


class _Loading(NamedTuple):
    """How a stage is loaded."""

    module: nn.Module
    mapper: ModelStateMapper
    kept: Sequence[str]
    copies: AbstractSet[str]
    """Weights whose values may come from an earlier stage."""

    @property
    def produced(self) -> set[str]:
        """Tensors of the stage that the mapper makes."""
        return {name for group in self.mapper.state_dependency_groups() for name in group.outputs}


class _Whole(NamedTuple):
    """What all stages together have, and read of a model state."""

    names: frozenset[str]
    read: frozenset[str]


# Any: only the job knows the types of its stages.
def _whole_of(
    modules: Sequence[nn.Module], built: Sequence[InitializeModelStageResult[Any]], context: DistributedContext
) -> _Whole:
    """Put together what the stages of all ranks have. All ranks must call it."""
    names = {name for module in modules for name in module.state_dict()}
    # A provider that has never loaded anything may have left a mapper out, which is said later.
    mappers: list[ModelStateMapper | None] = [result.state_mapper for result in built]
    read = {
        name
        for mapper in mappers
        if mapper is not None
        for group in mapper.state_dependency_groups()
        for name in group.inputs
    }
    parts = [(names, read)]
    if context.mesh_params.has_pipeline_parallel:
        parts = all_gather_object((names, read), context.pipeline_group)
    own, reads = zip(*parts, strict=True)
    return _Whole(frozenset[str]().union(*own), frozenset[str]().union(*reads))


def _kept(module: nn.Module, patterns: Sequence[str], whole: Collection[str]) -> list[str]:
    """Return the patterns that match names of a stage.

    Raises:
        ValueError: If one matches no name of any stage.
    """
    unused = [pattern for pattern in patterns if not fnmatch.filter(whole, pattern)]
    if unused:
        raise ValueError(f"keep matches nothing of any stage: {NearestNames(whole).described(unused)}.")
    return [pattern for pattern in patterns if fnmatch.filter(module.state_dict(), pattern)]


def _mapper_of(module: nn.Module, result: InitializeModelStageResult[Any]) -> ModelStateMapper:
    mapper = result.state_mapper
    # A provider that has never loaded anything may have left it out.
    if mapper is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise ValueError(
            f"model_stage_factory.source_checkpoint is given, but initialize_model_stage() has returned no state_mapper for "
            f"{type(module).__name__}. Return one, such as identity_mapper_from_module(model)."
        )
    return mapper


def _further_copies(stage: int, module: nn.Module, ties: Sequence[Tie]) -> set[str]:
    """Return all names in a stage of the weights whose values come from another copy."""
    # Not by get_parameter(), which finds compute leaves.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    own = [copy for tie in ties for copy in tie.own[tie.has_first :]]
    copies = [parameters[name] for position, name in own if position == stage]
    return _names_of(module, copies)


def _names_of(module: nn.Module, chosen: Collection[nn.Parameter]) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if any(parameter is each for each in chosen)}


class ModelStageExporter:
    """Exports the stages of a job to a model state."""

    # Any: only the job knows the types of its stages.
    def __init__(
        self, model_provider: ModelProvider[Any], modules: TrackedModules, dist_context: DistributedContext
    ) -> None:
        """Take what is exported.

        Args:
            model_provider: Knows the mapper of each stage.
            modules: Stages of this rank.
            dist_context: Topology of the job.
        """
        self._provider = model_provider
        self._modules = modules
        self._context = dist_context

    def export(
        self,
        save_dir: Path,
        *,
        shard_size_gb: float = 4.0,
        dtype: torch.dtype | None = None,
        manifest: bool = False,
        in_background: bool = False,
    ) -> BackgroundExport | None:
        """Write the weights as one model state, whatever the mesh. All ranks must call it, and it blocks until all have.

        Args:
            save_dir: Folder to write into, on a file system that all ranks share.
            shard_size_gb: Largest size of a file in GB.
            dtype: What floating point tensors are converted to; None keeps each tensor's own.
            manifest: Whether hashes of the files are written beside them.
            in_background: Whether threads write the files, from copies of the weights.

        Returns:
            With `in_background` the export, which all ranks must wait for.

        Raises:
            NotImplementedError: If the model provider has no export; with several ranks a RuntimeError that says so.
            ValueError: On all ranks, if a mapper does not fit its stage.
        """
        context, modules = self._context, self._modules.modules
        with failing_together(context):
            prepared = [
                self._provider.prepare_export_model_stage(
                    PrepareExportModelStageContext(dist_context=context, model=module)
                )
                for module in modules
            ]
        mappers = [result.state_mapper for result in prepared]
        if context.replica_group is not None:
            # Several ranks write, and their files must not mix what each of them has counted.
            broadcast_packed([buffer for module in modules for buffer in module.buffers()], context.replica_group)
        if not context.mesh_params.has_pipeline_parallel:
            [mapper], [module] = mappers, modules
            return save_model_state(
                save_dir, mapper, module, shard_size_gb, dtype=dtype, manifest=manifest, in_background=in_background
            )
        parts = ModelStateMapperParallel(self._without_further_copies(mappers))
        mesh = context.mesh_for(REGULAR_DOMAIN)
        return save_model_state_pipeline_parallel(
            save_dir,
            parts,
            mesh,
            "pp",
            modules,
            shard_size_gb,
            dtype=dtype,
            manifest=manifest,
            in_background=in_background,
        )

    def _without_further_copies(self, mappers: Sequence[ModelStateMapper]) -> list[ModelStateMapper]:
        """Leave out of each mapper the further copies of a tied weight that another stage writes under the same name."""
        tied = self._modules.ties.uncounted()
        copies = [_names_of(module, tied) for module in self._modules.modules]
        own = [
            {name for group in mapper.state_dependency_groups() if group.inputs - names for name in group.outputs}
            for mapper, names in zip(mappers, copies, strict=True)
        ]
        of_ranks = all_gather_object({name for names in own for name in names}, self._context.pipeline_group)
        everywhere = {name for names in of_ranks for name in names}
        return [
            ModelStateMapperSelectGroups(
                mapper, lambda group, names=names: bool(group.inputs - names) or not group.outputs <= everywhere
            )
            for mapper, names in zip(mappers, copies, strict=True)
        ]
