"""Send what a step has returned on the last stage to the other ranks of its pipeline, where somebody looks at it."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from d9d.core.types import PyTree

__all__ = ["OutputExchange"]

_CONSUMERS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
}
"""Hook that gets the outputs of a step. Predictions are what the Trainer returns, so they are always wanted."""

# `__name__`: the name of our package is another where a file is loaded for pytorch_lightning, see [Note: two Lightnings].
_OWN_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", __name__.split(".", 1)[0])
"""Packages with callbacks that do not look at outputs."""


class OutputExchange:
    """Shares outputs over a pipeline, if a hook of the module or of a callback takes them.

    Lightning's own callbacks do not look at outputs, and logits or generated samples can be large. So nothing is sent
    where only those are there.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, group: dist.ProcessGroup, source: int, device: torch.device
    ) -> None:
        """Find out who looks at outputs. All ranks of the pipeline must call it: one that has a callback counts for all.

        Args:
            trainer: Has the callbacks.
            module: The LightningModule.
            group: Ranks of the pipeline.
            source: Rank in the group that hosts the last stage.
            device: Device of this rank.
        """
        self._group = group
        self._source = source
        self._device = device
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        wanted = [
            is_overridden(hook, module) or any(map(_looks_at_outputs(hook), callbacks)) for hook in _CONSUMERS.values()
        ]
        flags = torch.tensor(wanted, dtype=torch.uint8, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        self._wanted = dict(zip(_CONSUMERS, map(bool, flags.tolist()), strict=True))

    def wants(self, name: str) -> bool:
        """Tell whether anybody looks at the outputs of a step, here or on another rank."""
        return self._wanted.get(name, True)

    # `Any`: the user's own outputs.
    def share(self, name: str, build: Callable[[], PyTree[Any]]) -> PyTree[Any]:
        """Return the output of a step, on its way over the host; None if nobody looks at it. Collective, if so.

        Args:
            name: Name of the step.
            build: Makes the output; called on the rank with the last stage.

        Raises:
            RuntimeError: On all ranks, if `build` fails, or the output can not be sent.
        """
        if not self.wants(name):
            return None
        is_source = self._group.rank() == self._source
        message: list[tuple[PyTree[Any], str | None]] = [(None, None)]
        output: PyTree[Any] = None
        failure: Exception | None = None
        if is_source:
            try:
                output = build()
                message = [(_sendable(output), None)]
            except Exception as error:  # noqa: BLE001  # raised below, on all ranks
                failure = error
                message = [(None, f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(message, group=self._group, group_src=self._source, device=self._device)
        received, problem = message[0]
        if problem is not None:
            raise RuntimeError(f"the output of {name} on the last stage can not be used: {problem}") from failure
        return output if is_source else move_data_to_device(received, self._device)


def _sendable(output: PyTree[Any]) -> PyTree[Any]:
    """Return an output on the host, if it can be sent: an error within the collective would leave the others waiting."""
    on_host = move_data_to_device(output, torch.device("cpu"))
    torch.save(on_host, io.BytesIO())
    return on_host


def _looks_at_outputs(hook: str) -> Callable[[Callback], bool]:
    def looks(callback: Callback) -> bool:
        if hook in vars(callback):
            # Lightning's LambdaCallback has the user's functions in its instances.
            return True
        is_ours = type(callback).__module__.split(".", 1)[0] in _OWN_PACKAGES
        return not is_ours and is_overridden(hook, callback, parent=Callback)

    return looks
