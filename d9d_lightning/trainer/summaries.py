"""Lightning's model summary, of the whole model where ranks have parts of it."""
# Lightning's summaries have no public names
# pyright: reportPrivateUsage=false

import dataclasses
import weakref
from functools import partial

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import NOT_APPLICABLE, get_human_readable_count
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from torch import nn

from d9d.core.placement import local_tensor

_Columns = list[tuple[str, list[str]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _KeptSummary:
    """What the callbacks print, under the names by which they ask for it."""

    columns: _Columns
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: dict[str, int]
    total_flops: int

    def _get_summary_data(self) -> _Columns:
        return self.columns


_KEPT: weakref.WeakKeyDictionary[nn.Module, dict[int, _KeptSummary]] = weakref.WeakKeyDictionary()
"""Summaries of modules from before they were cut into stages, by depth."""


def keep_summaries(trainer: Trainer, module: LightningModule) -> None:
    """Note what the summary callbacks of a Trainer will print, before a module is cut. No communication."""
    # No rank could run the example: the module may be on the meta device, and is cut afterwards.
    example, module.example_input_array = module.example_input_array, None
    for callback in _summaries_of(trainer):
        _KEPT.setdefault(module, {})[callback._max_depth] = _kept(module, callback._max_depth)
    module.example_input_array = example


def install_summaries(trainer: Trainer) -> None:
    """Let the summary callbacks of a Trainer print the whole model, and how much of it rank 0 has."""
    for callback in _summaries_of(trainer):
        vars(callback)["_summary"] = partial(_summarize, max_depth=callback._max_depth)


def release_summaries(trainer: Trainer) -> None:
    """Undo `install_summaries`."""
    for callback in _summaries_of(trainer):
        vars(callback).pop("_summary", None)


def _summaries_of(trainer: Trainer) -> list[ModelSummary]:
    callbacks: list[Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    return [
        callback
        for callback in callbacks
        if isinstance(callback, ModelSummary) and type(callback)._summary is ModelSummary._summary
    ]


def _kept(module: LightningModule, max_depth: int) -> _KeptSummary:
    summary = Summary(module, max_depth=max_depth)
    return _KeptSummary(
        columns=summary._get_summary_data(),
        total_parameters=summary.total_parameters,
        trainable_parameters=summary.trainable_parameters,
        model_size=summary.model_size,
        total_training_modes=summary.total_training_modes,
        total_flops=summary.total_flops,
    )


def _summarize(trainer: Trainer, module: LightningModule, *, max_depth: int) -> _KeptSummary:
    summary = _KEPT.get(module, {}).get(max_depth) or _kept(module, max_depth)
    submodules = dict(module.named_modules(remove_duplicate=False))
    columns = dict(summary.columns)
    local = [
        get_human_readable_count(_num_local(submodules[name])) if name in submodules else NOT_APPLICABLE
        for name in columns["Name"]
    ]
    # Where, and under which name, the printers expect it.
    position = list(columns).index("Params") + 1
    shown = [*summary.columns[:position], ("Params per Device", local), *summary.columns[position:]]
    return dataclasses.replace(summary, columns=shown)


def _num_local(module: nn.Module) -> int:
    return sum(local_tensor(parameter).numel() for parameter in module.parameters())
