"""Averages of weights that are kept where the weights are: on shards, and on the stages of a pipeline."""
# torch exports its foreach operations under private names only (torch 2.13)
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import contextlib
import copy
from collections.abc import Generator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from typing_extensions import override

from d9d.core.placement import like_parameter, local_tensor
from d9d.internals.broadcast import broadcast_packed
from d9d_lightning.checkpoints.restore import shard_model_state
from d9d_lightning.placements.fsdp_steps import show_module_shards
from d9d_lightning.strategy import D9DStrategy

_Tensors = dict[str, torch.Tensor]


class EMAWeightAveraging(Callback):
    """Keeps an average of the weights, which validation, checkpoints and the end of training use instead of them.

    Works on every mesh, and with every strategy: each rank averages its own part of each parameter, without
    communication, where Lightning's callback of this name copies the whole module. Checkpoints have the averages in
    ``state_dict`` and the weights themselves in ``current_model_state``, so that training goes on from those; either
    callback can resume from a checkpoint of the other.

    Averages start as a copy of the weights after the first update; until then validation and checkpoints see the
    weights. They are kept in float32 at least, since a bfloat16 average would not move: with a decay of 0.999 an update
    is below its resolution. When training ends, the module keeps the averages.
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        *,
        use_buffers: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe the average.

        Args:
            decay: Weight of the average in ``average = decay * average + (1 - decay) * weights``. None: the mean of the
                weights at all updates.
            update_every_n_steps: Optimizer steps between updates. 0: no updates after steps.
            update_starting_at_step: Index of the first optimizer step after which to update; None is the first.
            update_starting_at_epoch: Index of the first epoch after which to update, in addition. None: after no epoch.
            use_buffers: Whether floating point buffers (running statistics) are averaged. Otherwise, and where they are
                integers, the current ones are used.
            device: Where the averages are kept; None is the device of the weights.

        Raises:
            ValueError: For a decay outside of [0, 1] or a negative number of steps.
        """
        super().__init__()
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay ({decay}) must be from 0 to 1, or None for the mean over all updates.")
        if update_every_n_steps < 0:
            raise ValueError(f"update_every_n_steps ({update_every_n_steps}) must be 0 or more.")
        self._decay = decay
        self._update_every_n_steps = update_every_n_steps
        self._starting_step = update_starting_at_step or 0
        self._starting_epoch = update_starting_at_epoch
        self._use_buffers = use_buffers
        self._device = None if device is None else torch.device(device)
        self._latest_update_step = 0
        self._latest_update_epoch = -1
        self._forget()

    def _forget(self) -> None:
        self._num_averaged = 0
        self._averages: _Tensors = {}  # local tensors by name; empty before the first update
        self._kept: _Tensors | None = None  # the weights themselves, while the module has the averages
        self._is_evaluating = False
        self._loaded: Mapping[str, torch.Tensor] | None = None  # full averages of a checkpoint, not cut to shards yet

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Decide whether to update after an optimizer step or an epoch; the same on all ranks.

        Args:
            step_idx: Index of the optimizer step that has ended, or None.
            epoch_idx: Index of the epoch that has ended, or None.
        """
        if step_idx is not None:
            every = self._update_every_n_steps
            return every > 0 and step_idx >= self._starting_step and step_idx % every == 0
        return epoch_idx is not None and self._starting_epoch is not None and epoch_idx >= self._starting_epoch

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._forget()
            self._latest_update_step, self._latest_update_epoch = 0, -1

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(pl_module)
            self._latest_update_step = step

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(pl_module)
            self._latest_update_epoch = epoch

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_averages(trainer, pl_module)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kept is None:
            self._show_averages(trainer, pl_module)
            self._is_evaluating = self._kept is not None

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_evaluating:
            self._show_weights(pl_module)

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_validation_epoch_end(trainer, pl_module)

    @contextlib.contextmanager
    def showing(self, trainer: Trainer, module: nn.Module, *, averages: bool) -> Generator[None]:
        """Let the module have the averages in the block, if there are some yet, or the weights. All ranks must enter it.

        Args:
            trainer: Runs the module.
            module: That of the Trainer.
            averages: Whether the averages are shown, rather than the weights themselves.
        """
        shown_before, was_evaluating = self._kept is not None, self._is_evaluating

        def show(averages: bool) -> None:
            if averages:
                self._show_averages(trainer, module)
            else:
                self._show_weights(module)

        show(averages)
        try:
            yield
        finally:
            show(shown_before)
            self._is_evaluating = was_evaluating

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._latest_update_step, "latest_update_epoch": self._latest_update_epoch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict.get("latest_update_epoch", -1)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._has_averages(pl_module):
            return
        state = checkpoint["state_dict"]
        checkpoint["current_model_state"] = _replaced(state, self._kept or {}, pl_module)
        checkpoint["state_dict"] = _replaced(state, self._averages, pl_module)
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._num_averaged)}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if "current_model_state" not in checkpoint or "averaging_state" not in checkpoint:
            rank_zero_warn(
                "The checkpoint has no averages of weights: they start from its weights with the next update."
            )
            return
        rank_zero_info("Training goes on from current_model_state of the checkpoint; its state_dict are the averages.")
        self._forget()
        self._num_averaged = int(checkpoint["averaging_state"]["n_averaged"])
        if self._num_averaged:
            self._loaded = checkpoint["state_dict"]
        current = {"state_dict": checkpoint["current_model_state"]}
        trainer.strategy.load_model_state_dict(current, strict=pl_module.strict_loading)

    @torch.no_grad()
    def _update(self, module: nn.Module) -> None:
        current = self._current(module)
        if not self._has_averages(module):
            self._averages = {
                name: tensor.to(device=self._device or tensor.device, dtype=_average_dtype(tensor), copy=True)
                for name, tensor in current.items()
            }
        else:
            weight = 1 / (self._num_averaged + 1) if self._decay is None else 1 - self._decay
            self._move_averages(current, weight)
        self._num_averaged += 1

    def _move_averages(self, current: _Tensors, weight: float) -> None:
        averages: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for name, tensor in current.items():
            average = self._averages[name]
            target = tensor.to(device=average.device, dtype=average.dtype)
            if average.is_floating_point() or average.is_complex():
                averages.append(average)
                targets.append(target)
            else:
                average.copy_(target)
        if averages:
            torch._foreach_lerp_(averages, targets, weight)

    def _has_averages(self, module: nn.Module) -> bool:
        """Tell whether there has been an update, and cut to shards what a checkpoint has brought."""
        if self._loaded is not None:
            keys = _keys(module)
            state = shard_model_state(self._loaded, module, elsewhere=set(self._loaded).difference(keys))
            self._loaded = None
            found = {keys[name]: local_tensor(tensor) for name, tensor in state.items()}
            self._averages = {
                name: found.get(name, tensor).to(
                    device=self._device or tensor.device, dtype=_average_dtype(tensor), copy=True
                )
                for name, tensor in self._current(module).items()
            }
        return self._num_averaged > 0

    def _current(self, module: nn.Module) -> _Tensors:
        """Return what is averaged, as it is now: local tensors by name."""
        places = _places(module, fold_aliases=True)
        if not self._use_buffers:
            buffers = {name for name, _ in module.named_buffers()}
            places = {name: tensor for name, tensor in places.items() if name not in buffers}
        return {name: local_tensor(tensor).detach() for name, tensor in places.items()}

    @torch.no_grad()
    def _show_averages(self, trainer: Trainer, module: nn.Module) -> None:
        """Put the averages into the module and keep its weights. All ranks must call it."""
        if self._kept is not None or not self._has_averages(module):
            return
        current = self._current(module)
        self._kept = {name: tensor.clone() for name, tensor in current.items()}
        for name, tensor in current.items():
            tensor.copy_(self._averages[name])
        strategy = trainer.strategy
        if not isinstance(strategy, D9DStrategy) or not strategy.mesh.is_distributed:
            return
        buffers = [current[name] for name, _ in module.named_buffers() if name in current]
        group = strategy.dist_context.replica_group
        if group is not None and buffers:
            # Each rank has averaged its own, and those of the first are to be used, as everywhere.
            broadcast_packed(buffers, group)

    @torch.no_grad()
    def _show_weights(self, module: nn.Module) -> None:
        """Undo `_show_averages`."""
        if self._kept is None:
            return
        for name, tensor in self._current(module).items():
            tensor.copy_(self._kept[name])
        self._kept = None
        self._is_evaluating = False


def _average_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _places(module: nn.Module, *, fold_aliases: bool) -> _Tensors:
    """Return the parameters and buffers of a module by name. Its FSDP units show their shards afterwards.

    Args:
        module: Whole, or the part of this rank.
        fold_aliases: Whether a tensor with several names appears under its first one only.
    """
    show_module_shards(module)
    return {
        **dict(module.named_parameters(remove_duplicate=fold_aliases)),
        **dict(module.named_buffers(remove_duplicate=fold_aliases)),
    }


def _keys(module: nn.Module) -> dict[str, str]:
    """Return for each name of a parameter or buffer the first name of the same tensor."""
    first: dict[torch.Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in _places(module, fold_aliases=False).items()}


def _replaced(state: dict[str, Any], values: _Tensors, module: nn.Module) -> dict[str, Any]:
    """Return a state dict of a module with other local tensors, in the layouts of its own; what they lack stays."""
    places = _places(module, fold_aliases=False)
    chosen = {name: values[key] for name, key in _keys(module).items() if key in values}
    # A copy, which also has what torch keeps beside the tensors: the versions of the modules.
    replaced = copy.copy(state)
    for name, value in chosen.items():
        if name in state:
            replaced[name] = like_parameter(value.to(places[name].device), places[name])
    return replaced
