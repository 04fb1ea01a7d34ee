"""What a user says about the model states of a strategy."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeAlias, cast, get_args

from lightning.pytorch import LightningModule

from d9d.core.module_names import did_you_mean
from d9d.internals.model_states import source_problems
from d9d.model_state.io.load import LoadMode
from d9d.model_state.mapper import ModelStateMapper

__all__ = ["MapperSpec", "ModelStateOptions"]

MapperSpec: TypeAlias = Callable[[LightningModule], ModelStateMapper] | ModelStateMapper | None
"""A mapper, a function that makes one for the LightningModule, or None for the obvious one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStateOptions:
    """Where the weights come from, and how they are named there."""

    source_checkpoint: Path | None
    """Folder of a model state, or a .safetensors file. None: the module keeps its own values."""
    load_mapper: MapperSpec
    """Makes tensors of the module from those of the source. None: they have the same names."""
    export_mapper: MapperSpec
    """Makes tensors of an export from those of the module. None: the inverse of `load_mapper`."""
    keep_initial: Sequence[str]
    """Patterns of tensors of the module that the source does not have."""
    load_mode: LoadMode
    """Whether one rank reads for all that hold the same shard."""

    @classmethod
    def read(
        cls,
        source_checkpoint: str | Path | None,
        load_mapper: MapperSpec,
        export_mapper: MapperSpec,
        keep_initial: Sequence[str],
        load_mode: LoadMode,
    ) -> Self:
        """Take what a user has written."""
        return cls(
            source_checkpoint=None if source_checkpoint is None else Path(source_checkpoint),
            load_mapper=load_mapper,
            export_mapper=export_mapper,
            keep_initial=keep_initial,
            load_mode=load_mode,
        )

    def problems(self) -> list[str]:
        """Say all that is wrong with them, whatever is on the disk."""
        problems: list[str] = []
        if self.source_checkpoint is None:
            given = {"load_mapper": self.load_mapper is not None, "keep_initial": bool(self.keep_initial)}
            given["load_mode"] = self.load_mode != "each"
            problems += [
                f"{name} has no effect without source_checkpoint: name the folder of a model state."
                for name, is_given in given.items()
                if is_given
            ]
        patterns = cast("object", self.keep_initial)  # nobody has checked it
        if isinstance(patterns, str) or not isinstance(patterns, Sequence):
            problems.append(f"keep_initial ({patterns!r}) must be a list of patterns, such as ['head.*'].")
        if self.load_mode not in get_args(LoadMode):
            problems.append(
                f"load_mode ({self.load_mode!r}) must be one of {', '.join(map(repr, get_args(LoadMode)))}."
                f"{did_you_mean(self.load_mode, get_args(LoadMode))}"
            )
        for name, spec in (("load_mapper", self.load_mapper), ("export_mapper", self.export_mapper)):
            if spec is not None and not isinstance(spec, ModelStateMapper) and not callable(spec):
                problems.append(
                    f"{name} ({spec!r}) must be a ModelStateMapper, or a function that returns one for the LightningModule."
                )
        return problems

    def source_problems(self) -> list[str]:
        """Say why weights cannot be loaded, as far as a look at the folder tells."""
        return [] if self.source_checkpoint is None else source_problems("source_checkpoint", self.source_checkpoint)
