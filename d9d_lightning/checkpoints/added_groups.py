"""Groups of parameters that an optimizer gets while it trains, as from Lightning's `BaseFinetuning`.

[Note: groups of a resumed run]
Lightning lets this callback put its groups together again from names of parameters in its own state, which with stages
are those of rank 0, and leaves frozen what had been unfrozen. So both is done here instead, by the names in the checkpoint. A file
of plain Lightning does not say what trained, but what is in groups that were added did.
"""
# Lightning keeps what the callback knows to itself
# pyright: reportPrivateUsage=false

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from d9d.core.dist_ops import all_gather_object
from d9d_lightning.checkpoints.restore import NAMES_KEY, TRAINABLE_KEY
from d9d_lightning.checkpoints.stage_optimizers import StageCut, check_optimizers

__all__ = ["AddedGroups", "restore_added_groups"]


def restore_added_groups(trainer: Trainer, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Add the groups that finetuning callbacks had added before the checkpoint, and unfreeze what they had unfrozen.

    No communication. See [Note: groups of a resumed run]. Without such a callback nothing happens.

    Args:
        trainer: Has read the checkpoint, and given callbacks their states.
        module: The module.
        optimizers: Its optimizers, as ``configure_optimizers`` has made them.
    """
    callbacks: list[Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    restarting = [callback for callback in callbacks if isinstance(callback, BaseFinetuning) and callback._restarting]
    if not restarting:
        return
    checkpoint = trainer._checkpoint_connector._loaded_checkpoint or {}
    added: set[str] = set()
    for callback in restarting:
        callback._restarting = False
        for number, (optimizer, state) in enumerate(
            zip(optimizers, checkpoint.get("optimizer_states", []), strict=False)
        ):
            added |= _add_groups(module, optimizer, state.get(NAMES_KEY) or _names_in(callback, number))
    _unfreeze(module, checkpoint.get(TRAINABLE_KEY, added))


def _names_in(callback: BaseFinetuning, number: int) -> Sequence[Sequence[str]]:
    """Return the names that a file of plain Lightning has."""
    return [group["params"] for group in callback._internal_optimizer_metadata.get(number, [])]


def _add_groups(module: nn.Module, optimizer: Optimizer, names_by_group: Sequence[Sequence[str]]) -> set[str]:
    """Add the groups that the optimizer lacks, and return the names of what is in them."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    by_name = dict(module.named_parameters())
    added: set[str] = set()
    for names in names_by_group[len(optimizer.param_groups) :]:
        own = [name for name in names if name in by_name]
        if any(by_name[name] in held for name in own):
            # The groups are others altogether; loading says how they differ.
            break
        optimizer.add_param_group({"params": [by_name[name] for name in own]})
        added.update(own)
    return added


def _unfreeze(module: nn.Module, names: Collection[str]) -> None:
    by_name = dict(module.named_parameters())
    frozen = {by_name[name] for name in names if name in by_name and not by_name[name].requires_grad}
    for child in module.modules():
        # Callbacks freeze the statistics of such a layer with its parameters.
        if isinstance(child, _BatchNorm) and not frozen.isdisjoint(child.parameters(recurse=False)):
            child.track_running_stats = True
    for parameter in frozen:
        parameter.requires_grad = True


_RULE = (
    "the optimizers are not the same on all pipeline ranks. While they train, add one group per epoch, in "
    "on_train_epoch_start, with the same options on all ranks; those without a parameter for it are given an empty one. "
    "Or add each group on all ranks, empty where it has no parameters"
)


class AddedGroups:
    """Lets the ranks of a pipeline have the same groups, where some have no parameters for one that was added.

    Callbacks add none there, but count on it: they change the learning rate of the last group. Which of several groups a rank
    lacks cannot be told, so there may be one per epoch.
    """

    def __init__(self, module: nn.Module, cut: StageCut) -> None:
        """Follow the optimizers of a module. No communication.

        Args:
            module: The module, cut into stages.
            cut: The whole module, and the ranks that have it.
        """
        self._module = module
        self._cut = cut
        self._epoch: int | None = None
        self._sizes: list[int] = []

    def agree(self, optimizers: Sequence[Optimizer], epoch: int) -> None:
        """Add groups without parameters, in the first step of an epoch. All ranks of the pipeline must call it.

        Raises:
            ValueError: On all ranks, if the groups are not the same then.
        """
        if epoch == self._epoch:
            return
        self._epoch = epoch
        own = [[_options(group) for group in optimizer.param_groups] for optimizer in optimizers]
        by_rank = all_gather_object(own, self._cut.group)
        longest = [max(groups, key=len) for groups in zip(*by_rank, strict=True)]
        for optimizer, groups in zip(optimizers, longest, strict=True):
            for options in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [], **options})
        sizes = [len(groups) for groups in longest]
        if sizes != self._sizes:
            check_optimizers(self._module, optimizers, self._cut, _RULE)
        self._sizes = sizes


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
