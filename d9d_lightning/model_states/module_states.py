"""Load a LightningModule from a model state, and export it to one, on whatever part of it a rank has."""

import dataclasses
import fnmatch
import glob
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.internals.model_states import failing_together, huggingface_cache_root
from d9d.model_state.io.load import load_model_state
from d9d.model_state.io.save import save_model_state, save_model_state_pipeline_parallel
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperIdentity
from d9d.model_state.mapper.names import NearestNames
from d9d_lightning.checkpoints.stage_optimizers import StageCut
from d9d_lightning.model_states.options import MapperSpec, ModelStateOptions
from d9d_lightning.model_states.stage_parts import part_to_export, part_to_load
from d9d_lightning.model_states.used_modules import has_run, note_run
from d9d_lightning.placements.fsdp_steps import show_module_shards
from d9d_lightning.placements.module_setup import ModelBuffers

__all__ = ["ExportFormat", "ModuleStates"]


@dataclasses.dataclass(frozen=True, slots=True)
class ExportFormat:
    """How an export is written."""

    shard_size_gb: float = 4.0
    """Largest size of a file in GB (10^9 bytes), but for one that holds a single larger tensor."""
    dtype: torch.dtype | None = None
    """What floating point tensors are converted to; None keeps each tensor's own."""
    manifest: bool = False
    """Whether hashes of the files are written beside them."""
    show_progress: bool = False
    """Whether rank 0 shows a progress bar."""


class ModuleStates:
    """Loads and exports the module of a strategy."""

    def __init__(self, options: ModelStateOptions) -> None:
        """Take what the user has said; nothing is read yet."""
        self._options = options
        self._module: LightningModule | None = None
        self._load_mapper: ModelStateMapper | None = None
        self._export_mapper: ModelStateMapper | None = None

    def is_to_load(self, module: LightningModule) -> bool:
        """Tell whether `load` will load something."""
        return self._options.source_checkpoint is not None and not has_run(module)

    def prepare(self, module: LightningModule) -> None:
        """Make the mappers of a module, as long as it is whole. Does nothing the second time.

        Raises:
            TypeError: If a function returns something else.
        """
        if self._module is module:
            return
        self._load_mapper = _build("load_mapper", self._options.load_mapper, module)
        self._export_mapper = _build("export_mapper", self._options.export_mapper, module)
        self._module = module

    def load(
        self,
        module: LightningModule,
        context: DistributedContext | None,
        device: torch.device,
        cut: StageCut | None,
        *,
        show_progress: bool,
    ) -> None:
        """Load the source, unless a run has used the module already. All ranks must call it; it blocks the host.

        Args:
            module: With memory, and distributed if it will be.
            context: Ranks of the job; None on one process.
            device: Device of this rank.
            cut: The whole module, if it is cut into pipeline stages.
            show_progress: Whether rank 0 shows a progress bar.

        Raises:
            ValueError: On all ranks, if the source, the mapper and the module do not fit together, with all that is wrong.
        """
        source = self._options.source_checkpoint
        if source is not None and has_run(module):
            rank_zero_info(f"source_checkpoint ({source}) is not loaded: a run has used this module already.")
        elif source is not None:
            show_module_shards(module)
            with failing_together(context):
                own = _tensors(module)
                whole = own if cut is None else cut.state_names
                mapper = self._load_mapper
                if mapper is None:
                    mapper = _identity(own)
                elif cut is not None:
                    mapper = part_to_load(mapper, own, whole)
                keep = _kept(self._options.keep_initial, own, whole)
                cache_root = huggingface_cache_root(source)
                load_model_state(source, mapper, device, module, show_progress, keep=keep, cache_root=cache_root)
        note_run(module)

    def export(
        self,
        path: Path,
        module: LightningModule,
        context: DistributedContext | None,
        cut: StageCut | None,
        mapper: ModelStateMapper | None,
        form: ExportFormat,
    ) -> None:
        """Write the weights of a module, each tensor once. All ranks must call it, and it blocks until all have.

        Args:
            path: Folder that is to hold them.
            module: As it trains.
            context: Ranks of the job; None on one process.
            cut: The whole module, if it is cut into pipeline stages.
            mapper: Instead of the one of the options.
            form: How they are written.

        Raises:
            ValueError: On all ranks, if the mapper does not fit the module, with all that is wrong.
        """
        show_module_shards(module)
        if context is not None:
            # Several ranks write, and their files must not mix what each has counted. As in an evaluation.
            ModelBuffers(module, differ=True).take_from_first(context.replica_group)
        names_by_rank = [] if cut is None else all_gather_object(list(_tensors(module)), cut.group)
        with failing_together(context):
            self.prepare(module)
            chosen = mapper or self._mapper_to_export(module)
            if cut is not None:
                chosen = part_to_export(chosen, names_by_rank, cut.group.rank(), cut.last_rank)
        size, bar = form.shard_size_gb, form.show_progress
        if cut is None or context is None:
            save_model_state(path, chosen, module, size, bar, dtype=form.dtype, manifest=form.manifest)
            return
        mesh = context.mesh_for(DENSE_DOMAIN)
        save_model_state_pipeline_parallel(
            path, chosen, mesh, "pp", [module], size, bar, dtype=form.dtype, manifest=form.manifest
        )

    def _mapper_to_export(self, module: LightningModule) -> ModelStateMapper:
        if self._export_mapper is not None:
            return self._export_mapper
        if self._load_mapper is not None:
            try:
                return _with_rest(self._load_mapper.inverse(), module)
            except NotImplementedError as error:
                rank_zero_warn(f"The export has the layout of the module, as load_mapper has no inverse: {error}")
        return _identity(_tensors(module))


def _build(name: str, spec: MapperSpec, module: LightningModule) -> ModelStateMapper | None:
    if spec is None or isinstance(spec, ModelStateMapper):
        return spec
    mapper = spec(module)
    # The function is the user's.
    if not isinstance(mapper, ModelStateMapper):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} has returned {mapper!r} for {type(module).__name__}. Return a ModelStateMapper.")
    return mapper


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model state of a module holds; tied tensors are the same object."""
    state = module.state_dict(keep_vars=True)
    # Modules may keep other things there (get_extra_state).
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _identity(names: Collection[str]) -> ModelStateMapper:
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])


def _with_rest(mapper: ModelStateMapper, module: nn.Module) -> ModelStateMapper:
    """Let an inverted mapper pass on what the source did not have, so that an export has all of the module."""
    tensors = _tensors(module)
    read = {name for group in mapper.state_dependency_groups() for name in group.inputs}
    covered = {id(tensors[name]) for name in read & tensors.keys()}
    rest = [name for name, tensor in tensors.items() if name not in read and id(tensor) not in covered]
    return ModelStateMapperParallel([mapper, _identity(rest)]) if rest else mapper


def _kept(patterns: Sequence[str], own: Collection[str], whole: Collection[str]) -> list[str]:
    """Return the names of this rank that patterns match, as patterns.

    Raises:
        ValueError: If a pattern matches nothing of the whole module.
    """
    unused = [pattern for pattern in patterns if not fnmatch.filter(whole, pattern)]
    if unused:
        raise ValueError(f"keep_initial matches nothing of the module: {NearestNames(whole).described(unused)}.")
    return [glob.escape(name) for name in own if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
