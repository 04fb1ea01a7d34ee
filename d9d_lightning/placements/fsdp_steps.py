"""Keep what FSDP has gathered fresh and present while the code of a step runs."""
# FSDP offers no public way to put its backward hook on a loss (torch 2.13)
# pyright: reportPrivateUsage=false

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from d9d.core.fsdp_internals import fsdp_units, show_shards
from d9d_lightning.pipeline.cut import pipeline_of
from d9d_lightning.placements.parallelize import outermost_with_forward


def show_module_shards(module: nn.Module) -> None:
    """Let ``parameters()`` of a LightningModule show the shards: FSDP leaves some gathered. No communication."""
    pipeline = pipeline_of(module)
    # A stage is an FSDP unit, and no submodule of the LightningModule.
    for root in (module, *(() if pipeline is None else pipeline.stages)):
        show_shards(fsdp_units(root))


class FsdpSteps:
    """Drives the FSDP units of a LightningModule where Lightning's order of calls is not FSDP's.

    [Note: stale parameters]
    FSDP does not gather a unit that is gathered already. If the forward pass before an optimizer step had no backward
    pass (a hook that looks at predictions), the next one would compute with the old values. So all units are freed
    after each step of an optimizer.

    [Note: manual optimization under FSDP]
    FSDP finishes a backward pass from a hook on what ``forward`` returned, and frees the parameters then. In manual
    optimization the backward pass runs inside ``training_step``, its loss need not come from ``forward``, and the step
    goes on with layers that belong to the root. So the hook is put on the loss, and the root is gathered again when an
    optimizer is through, or when the next layer is called. In between, hooks see the shards and their gradients.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], *, is_manual: bool) -> None:
        """Find the units and hook into the optimizers.

        Args:
            module: A module that is distributed already.
            optimizers: Optimizers of its parameters.
            is_manual: Whether the module's ``training_step`` runs the backward passes.
        """
        self._units = fsdp_units(module)
        self._root = module if is_manual and isinstance(module, FSDPModule) else None
        self._is_inside_step = False
        self._handles: list[RemovableHandle] = []
        if self._units:
            self._handles = [optimizer.register_step_post_hook(self._after_optimizer) for optimizer in optimizers]
        if self._root is not None:
            self._handles += [
                child.register_forward_pre_hook(self._before_layer) for child in outermost_with_forward(module)
            ]

    @contextmanager
    def inside_step(self) -> Generator[None]:
        """Note that ``training_step`` runs in the block."""
        self._is_inside_step = True
        try:
            yield
        finally:
            self._is_inside_step = False
            if self._root is not None:
                self._root.reshard()

    def before_backward(self, loss: torch.Tensor) -> None:
        """Let FSDP take part in a backward pass that starts here. See [Note: manual optimization under FSDP]."""
        if self._root is not None and self._is_inside_step:
            self._root._get_fsdp_state()._register_pre_backward_hook(loss)

    def before_optimizer(self) -> None:
        """Let the hooks before an optimizer step see the shards, also if a forward pass came in between."""
        if self._root is not None:
            self._root.reshard()

    def free(self) -> None:
        """Let ``parameters()`` show the shards again. See also [Note: stale parameters]."""
        for unit in self._units:
            unit.reshard()

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_layer(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._gather_root()

    def _after_optimizer(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.free()
        self._gather_root()

    def _gather_root(self) -> None:
        if self._root is not None and self._is_inside_step:
            self._root.unshard()
