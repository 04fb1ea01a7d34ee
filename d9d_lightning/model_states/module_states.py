"""Load a LightningModule from a model state, and export it to one, on whatever part of it a rank has."""

import dataclasses
import fnmatch
import glob
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.internals.model_states import failing_together, huggingface_cache_root, names_to_load
from d9d.model_state.io.load import load_model_state
from d9d.model_state.io.save import BackgroundExport, save_model_state, save_model_state_pipeline_parallel
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.adapters import identity_mapper_from_names
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.names import NearestNames
from d9d_lightning.checkpoints.stage_optimizers import StageCut
from d9d_lightning.model_states.options import MapperSpec, ModelStateOptions
from d9d_lightning.model_states.stage_parts import part_to_export, part_to_load
from d9d_lightning.model_states.used_modules import note_origin, origin_of
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
    in_background: bool = False
    """Whether threads write the files, from copies of the weights."""


class ModuleStates:
    """Loads and exports the module of a strategy."""

    def __init__(self, options: ModelStateOptions) -> None:
        """Take what the user has said; nothing is read yet."""
        self._options = options
        self._module: LightningModule | None = None
        self._load_mapper: ModelStateMapper | None = None
        self._export_mapper: ModelStateMapper | None = None
        self._has_loaded = False
        self._said: set[str] = set()

    def is_to_load(self, module: LightningModule) -> bool:
        """Tell whether `load` will load something in the run of the module's Trainer."""
        if self._options.source_checkpoint is None or origin_of(module) is not None:
            return False
        return _is_fitting(module) or not self._has_loaded

    def names_to_load(self, module: LightningModule) -> frozenset[str]:
        """Return the tensors of this rank that `load` will bring in the run of the module's Trainer."""
        return names_to_load(module, self._options.keep_initial) if self.is_to_load(module) else frozenset()

    def note_fit(self, module: LightningModule) -> None:
        """Note that other processes have trained the module, and have loaded the source before."""
        self._has_loaded = self._options.source_checkpoint is not None
        note_origin(module, "loaded" if self._has_loaded else "trained")

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
    ) -> None:
        """Load the source, or say why not: [Note: a module is loaded once]. All ranks must call it; it blocks the host.

        Args:
            module: With memory, and distributed if it will be. Its Trainer runs.
            context: Ranks of the job; None on one process.
            device: Device of this rank.
            cut: The whole module, if it is cut into pipeline stages.

        Raises:
            ValueError: On all ranks, if the source, the mapper and the module do not fit together, with all that is wrong;
                or if the module was trained without the source, and is to be trained with it.
        """
        source, name = self._options.source_checkpoint, type(module).__name__
        is_fitting, origin = _is_fitting(module), origin_of(module)
        if source is None:
            if is_fitting and origin is None:
                note_origin(module, "trained")
        elif is_fitting and origin == "trained":
            raise ValueError(
                f"source_checkpoint ({source}) would overwrite what {name} has learnt in a fit without it. Build the "
                f"module anew to start from the source, or leave source_checkpoint out to go on with the module as it is."
            )
        elif self.is_to_load(module):
            if not is_fitting:
                self._say_once(
                    f"source_checkpoint ({source}) is loaded into {name}, in place of the weights that it has. To evaluate "
                    f"those, leave source_checkpoint out, or give the Trainer their ckpt_path."
                )
            self._load_source(source, module, context, device, cut)
            note_origin(module, "loaded")
            self._has_loaded = True
        elif origin is None:
            self._say_once(
                f"source_checkpoint ({source}) is not loaded into {name}: the strategy has loaded it already, into another "
                f"module. This one is evaluated with the weights that it has."
            )
        else:
            self._say_once(f"source_checkpoint ({source}) is not loaded: a run has used this module already.")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)

    def _load_source(
        self,
        source: Path,
        module: LightningModule,
        context: DistributedContext | None,
        device: torch.device,
        cut: StageCut | None,
    ) -> None:
        show_module_shards(module)
        with failing_together(context):
            own = _tensors(module)
            whole = own if cut is None else cut.state_names
            # Other stages read the rest.
            expected: Collection[str] = whole
            mapper = self._load_mapper
            if mapper is None:
                mapper = identity_mapper_from_names(own)
            else:
                expected = {name for group in mapper.state_dependency_groups() for name in group.inputs}
                mapper = mapper if cut is None else part_to_load(mapper, own, whole)
            keep = _kept(self._options.keep_initial, own, whole)
        load_model_state(
            source,
            mapper,
            device,
            module,
            module.trainer.progress_bar_callback is not None,
            load_mode="each" if context is None else self._options.load_mode,
            keep=keep,
            keep_option="keep_initial",
            expected=expected,
            process_group=None if context is None else context.groups[0],
            cache_root=huggingface_cache_root(source),
        )

    def export(
        self,
        path: Path,
        module: LightningModule,
        context: DistributedContext | None,
        cut: StageCut | None,
        mapper: ModelStateMapper | None,
        form: ExportFormat,
    ) -> BackgroundExport | None:
        """Write the weights of a module, each tensor once. All ranks must call it, and it blocks until all have.

        Args:
            path: Folder that is to hold them.
            module: As it trains.
            context: Ranks of the job; None on one process.
            cut: The whole module, if it is cut into pipeline stages.
            mapper: Instead of the one of the options.
            form: How they are written.

        Returns:
            The export, which all ranks must wait for, if it is written in the background.

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
            chosen = mapper or self.mapper_to_export(module)
            if cut is not None:
                chosen = part_to_export(chosen, names_by_rank, cut.group.rank(), cut.last_rank)
        if cut is None or context is None:
            save = partial(save_model_state, path, chosen, module)
        else:
            mesh = context.mesh_for(DENSE_DOMAIN)
            save = partial(save_model_state_pipeline_parallel, path, chosen, mesh, "pp", [module])
        return save(
            shard_size_gb=form.shard_size_gb,
            show_progress=form.show_progress,
            dtype=form.dtype,
            manifest=form.manifest,
            in_background=form.in_background,
        )

    def mapper_to_export(self, module: LightningModule) -> ModelStateMapper:
        """Return what an export takes where it is given no mapper. The same on all ranks; no communication.

        Args:
            module: One that `prepare` has seen.

        Raises:
            ValueError: If there is no way back from `load_mapper`.
        """
        if self._export_mapper is not None:
            return self._export_mapper
        if self._load_mapper is None:
            return identity_mapper_from_names(_tensors(module))
        try:
            inverse = self._load_mapper.inverse()
        except NotImplementedError as error:
            raise ValueError(
                f"The layout of an export is not known, as load_mapper has no inverse: {error} Give that, or "
                f"D9DStrategy(export_mapper=...), or a mapper to the export itself."
            ) from error
        return _with_rest(inverse, module)


def _is_fitting(module: LightningModule) -> bool:
    return module.trainer.state.fn == TrainerFn.FITTING


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


def _with_rest(mapper: ModelStateMapper, module: nn.Module) -> ModelStateMapper:
    """Let an inverted mapper pass on what the source did not have, so that an export has all of the module."""
    tensors = _tensors(module)
    read = {name for group in mapper.state_dependency_groups() for name in group.inputs}
    covered = {id(tensors[name]) for name in read & tensors.keys()}
    rest = [name for name, tensor in tensors.items() if name not in read and id(tensor) not in covered]
    return ModelStateMapperParallel([mapper, identity_mapper_from_names(rest)]) if rest else mapper


def _kept(patterns: Sequence[str], own: Collection[str], whole: Collection[str]) -> list[str]:
    """Return the names of this rank that patterns match, as patterns.

    Raises:
        ValueError: If a pattern matches nothing of the whole module.
    """
    unused = [pattern for pattern in patterns if not fnmatch.filter(whole, pattern)]
    if unused:
        raise ValueError(f"keep_initial matches nothing of the module: {NearestNames(whole).described(unused)}.")
    return [glob.escape(name) for name in own if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
