"""The package for ``import pytorch_lightning as pl``: ``from d9d_lightning.pytorch_lightning import D9DStrategy``.

[Note: two Lightnings]
The package ``pytorch_lightning`` is ``lightning.pytorch`` once more, with classes of its own: a Trainer of one takes no
modules and no strategies of the other. Lightning makes it from the same source files, in which it replaces the names of
its packages. The same is done here when this module is imported: the files of ``d9d_lightning`` are loaded a second time,
as submodules of this one.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from typing_extensions import override

__all__ = [
    "D9DDataModule",
    "D9DStrategy",
    "EMAWeightAveraging",
    "GradientNormLogger",
    "ModelStateExport",
    "PipelineStages",
    "elastic_dataloader",
    "grad_norm",
    "measure_layer_costs",
    "register",
    "sync_over",
]

_ORIGINAL = "d9d_lightning"
_RENAMED = {
    rf"\b{_ORIGINAL}\b": __name__,
    r"\blightning\.pytorch\b": "pytorch_lightning",
    r"\blightning\.fabric\b": "lightning_fabric",
}


class _RenamingLoader(SourceFileLoader):
    """Loads a source file with other names of packages in it."""

    @override
    def get_code(self, fullname: str) -> CodeType:
        # Not through the bytecode beside the file, which has the names as they stand there.
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        for name, replacement in _RENAMED.items():
            text = re.sub(name, replacement, text)
        return compile(text, path, "exec", dont_inherit=True)


class _SubmoduleFinder(MetaPathFinder):
    """Finds the submodules of this module beside it."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        original = importlib.util.find_spec(_ORIGINAL + fullname.removeprefix(__name__))
        if original is None or original.origin is None:
            return None
        loader = _RenamingLoader(fullname, original.origin)
        spec = importlib.util.spec_from_file_location(fullname, original.origin, loader=loader)
        if spec is not None and spec.submodule_search_locations is not None:
            # Not the folder, in which Python's own finder would come first and load the files as they are.
            spec.submodule_search_locations = []
        return spec


__path__: list[str] = []
"""Makes this module a package, so that it can have submodules."""

sys.meta_path.append(_SubmoduleFinder())


def _load(module: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{module}")


# `Any`: a type checker would take them for classes of the other Lightning.
D9DStrategy: Any = _load("strategy").D9DStrategy
"""As `d9d_lightning.D9DStrategy`."""
register: Any = _load("registry").register
"""As `d9d_lightning.register`; the names are known to ``pytorch_lightning``."""
PipelineStages: Any = _load("pipeline.stages").PipelineStages
"""As `d9d_lightning.PipelineStages`."""
measure_layer_costs: Any = _load("pipeline.stages").measure_layer_costs
"""As `d9d_lightning.measure_layer_costs`."""
grad_norm: Any = _load("gradients.norms").grad_norm
"""As `d9d_lightning.grad_norm`."""
GradientNormLogger: Any = _load("callbacks").GradientNormLogger
"""As `d9d_lightning.callbacks.GradientNormLogger`."""
EMAWeightAveraging: Any = _load("callbacks").EMAWeightAveraging
"""As `d9d_lightning.callbacks.EMAWeightAveraging`."""
ModelStateExport: Any = _load("callbacks").ModelStateExport
"""As `d9d_lightning.callbacks.ModelStateExport`."""
sync_over: Any = _load("metrics").sync_over
"""As `d9d_lightning.metrics.sync_over`."""
D9DDataModule: Any = _load("data").D9DDataModule
"""As `d9d_lightning.data.D9DDataModule`."""
elastic_dataloader: Any = _load("data").elastic_dataloader
"""As `d9d_lightning.data.elastic_dataloader`."""
