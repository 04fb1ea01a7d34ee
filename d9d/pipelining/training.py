"""One optimizer and one schedule over all stages of a rank."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from d9d.core.offload import MovableMemory, Offloadable, OffloadContext, OnloadContext
from d9d.core.protocol import LRSchedulerProtocol, OptimizerProtocol
from d9d.core.pytree import tree_leaves

TStage = TypeVar("TStage")


class PipelinedOptimizer(OptimizerProtocol, Offloadable):
    """Steps the optimizers of all stages of this rank."""

    def __init__(self, mesh_pp: DeviceMesh | None, optimizers: Sequence[OptimizerProtocol]) -> None:
        """Combine optimizers.

        Args:
            mesh_pp: One-dimensional mesh of pipeline ranks; None on a single process.
            optimizers: One per stage, in stage order.
        """
        self._pp_rank = 0 if mesh_pp is None else mesh_pp.get_local_rank()
        self._optimizers = list(optimizers)
        self._memory = MovableMemory()

    @property
    def by_stage(self) -> dict[str, OptimizerProtocol]:
        """The optimizers by their keys in the state dict."""
        return _by_stage(self._pp_rank, self._optimizers)

    def step(self) -> None:
        """Update the parameters of all stages."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients of all stages."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def offload(self, ctx: OffloadContext) -> None:
        """Move the states to the host. Optimizers can not step until `onload`.

        Raises:
            NotImplementedError: If an optimizer is none of torch, so that its state is not known.
        """
        self._memory.offload([tensor for optimizer in self._optimizers for tensor in _state_tensors(optimizer)], ctx)

    def onload(self, ctx: OnloadContext) -> None:
        """Bring the states back."""
        self._memory.onload(ctx)

    def is_offloaded(self) -> bool:
        """Tell whether the states are on the host."""
        return self._memory.is_offloaded

    # Any: state dicts hold what their owners choose.
    def state_dict(self) -> dict[str, Any]:
        """Return the state of each stage, under ``pp_<rank>_stage_<index>``."""
        return {key: optimizer.state_dict() for key, optimizer in self.by_stage.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each stage."""
        for key, optimizer in self.by_stage.items():
            optimizer.load_state_dict(state_dict[key])


class PipelinedLRScheduler(LRSchedulerProtocol):
    """Steps the learning rate schedules of all stages of this rank."""

    def __init__(self, mesh_pp: DeviceMesh | None, schedulers: Sequence[LRSchedulerProtocol]) -> None:
        """Combine schedules; see `PipelinedOptimizer`."""
        self._schedulers = list(schedulers)
        self._by_stage = _by_stage(0 if mesh_pp is None else mesh_pp.get_local_rank(), self._schedulers)

    @property
    def by_stage(self) -> dict[str, LRSchedulerProtocol]:
        """The schedules by their keys in the state dict."""
        return self._by_stage

    def step(self) -> None:
        """Advance the schedules of all stages."""
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each stage, under ``pp_<rank>_stage_<index>``."""
        return {key: scheduler.state_dict() for key, scheduler in self._by_stage.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each stage."""
        for key, scheduler in self._by_stage.items():
            scheduler.load_state_dict(state_dict[key])


def _by_stage(pp_rank: int, stages: Sequence[TStage]) -> dict[str, TStage]:
    return {f"pp_{pp_rank}_stage_{index}": stage for index, stage in enumerate(stages)}


def _state_tensors(optimizer: OptimizerProtocol) -> list[torch.Tensor]:
    if not isinstance(optimizer, Optimizer):
        raise NotImplementedError(
            f"the state of {type(optimizer).__name__} is not known, so that it can not be offloaded. Make it a subclass of "
            f"torch.optim.Optimizer."
        )
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
