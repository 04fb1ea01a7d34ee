"""Steps whose loss or gradient norm is not finite: left out, or the end of the fit, on all ranks alike."""
# Lightning wraps closures in a method without a public name
# pyright: reportPrivateUsage=false

import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import LBFGS, Optimizer

from d9d.core.device import accumulator_dtype
from d9d.internals.nonfinite import NonfiniteStepError, OnNonfinite, find_nonfinite
from d9d_lightning.gradients.precision import MeshClipping, clips_by_norm
from d9d_lightning.jobs.launch import active_context

__all__ = ["NonfiniteSteps"]

_log = logging.getLogger(__name__)


class _LeaveOutError(Exception):
    """Leaves an optimizer between its closure and its update."""


class NonfiniteSteps:
    """Looks at losses and gradient norms before each update, and decides what becomes of it.

    [Note: leaving out an update]
    Lightning runs the backward pass in the closure of an optimizer, which torch's optimizers call before they change
    anything. Raising at the end of the closure leaves the optimizer, of whatever kind, as it was. Lightning's counters and
    schedulers of learning rates go on, as they do where a scaler leaves out a step.
    """

    def __init__(self, policy: OnNonfinite) -> None:
        """Decide on a policy.

        Raises:
            ValueError: If it is none.
        """
        if policy not in get_args(OnNonfinite):
            raise ValueError(f"on_nonfinite ({policy!r}) must be one of {', '.join(map(repr, get_args(OnNonfinite)))}.")
        self._policy: OnNonfinite = policy
        self._own_loss: torch.Tensor | None = None
        self.num_skipped = 0
        """Optimizer steps of this strategy that were left out; the same on all ranks."""

    def install(self, plugin: Precision, clipping: MeshClipping) -> None:
        """Look at each step of a precision plugin, between clipping and update.

        On the instance, for the reasons of `install_mesh_clipping`.

        Raises:
            ValueError: If the plugin leaves out steps by itself.
        """
        if self._policy == "ignore":
            return
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise ValueError(
                f"on_nonfinite={self._policy!r} does not go with precision='16-mixed': its scaler leaves out steps that are not "
                f"finite by itself, and has to. Use 'bf16-mixed', or on_nonfinite='ignore'."
            )
        # No function in a function: a plugin is pickled where processes are spawned.
        vars(plugin)["_after_closure"] = partial(self._after_closure, plugin, clipping)

    def _after_closure(
        self, plugin: Precision, clipping: MeshClipping, model: LightningModule, optimizer: Optimizer
    ) -> None:
        # Values that are clipped one by one are finite afterwards.
        norm = None if clips_by_norm(model) else clipping.measure(optimizer)
        clipping.last_norm = None
        type(plugin)._after_closure(plugin, model, optimizer)
        norm = clipping.last_norm if norm is None else norm
        self._look(model, optimizer, clipping.measure(optimizer) if norm is None else norm)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Count a loss of this rank towards the next step. No communication; the host waits for nothing."""
        if self._policy != "ignore":
            own = loss.detach().to(accumulator_dtype(loss.device)).sum()
            self._own_loss = own if self._own_loss is None else self._own_loss + own

    @contextmanager
    def leaving_out(self) -> Generator[None]:
        """End the block, and no more, if the step inside is left out."""
        with suppress(_LeaveOutError):
            yield

    def _look(self, model: LightningModule, optimizer: Optimizer, norm: torch.Tensor) -> None:
        if isinstance(optimizer, LBFGS):
            raise NotImplementedError(
                f"on_nonfinite={self._policy!r} with LBFGS, which has changed weights before it calls its closure again."
            )
        context = active_context()
        own_loss, self._own_loss = self._own_loss, None
        found = find_nonfinite(own_loss, norm, None if context is None else dist.group.WORLD)
        if found is None:
            return
        step = model.trainer.global_step + 1
        if self._policy == "raise":
            raise NonfiniteStepError(
                f"step {step}: {found}. The weights are as they were before it. Look at its data and the learning rate, or use "
                f"D9DStrategy(on_nonfinite='skip') to leave such steps out."
            )
        self.num_skipped += 1
        if model.trainer.is_global_zero:
            _log.warning("step %d is left out (%d since the start): %s.", step, self.num_skipped, found)
        raise _LeaveOutError
