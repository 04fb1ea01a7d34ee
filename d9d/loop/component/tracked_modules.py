"""The model stages of this rank, as the loop knows them."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import REGULAR_DOMAIN, DistributedContext
from d9d.core.fsdp_internals import fsdp_units, show_shards
from d9d.core.offload import MovableMemory, Offloadable, OffloadContext, OnloadContext
from d9d.core.placement import compute_leaf
from d9d.internals.tied_parameters import TiedParameters

StatefulPredicate = Callable[[str, nn.Module], bool]
"""Tells whether a checkpoint holds the entry of this name in a stage's state dict."""


class TrackedModules(Stateful, Offloadable):
    """Model stages that this rank hosts, in stage order."""

    def __init__(
        self,
        dist_context: DistributedContext,
        modules: list[nn.Module],
        stateful_predicate: StatefulPredicate,
        ties: TiedParameters | None = None,
    ) -> None:
        """Track modules.

        Args:
            dist_context: Topology of the job.
            modules: Stages of this rank.
            stateful_predicate: Chooses the entries that checkpoints hold.
            ties: Weights of which other stages have copies too; none by default.
        """
        self._modules = modules
        self._ties = ties or TiedParameters()
        self._predicate = stateful_predicate
        self._pp_rank = dist_context.mesh_for(REGULAR_DOMAIN).get_local_rank("pp") if dist_context.is_distributed else 0
        self._memory = MovableMemory()

    @property
    def modules(self) -> list[nn.Module]:
        """The stages, in stage order."""
        return self._modules

    @property
    def ties(self) -> TiedParameters:
        """The weights of which other stages have copies too."""
        return self._ties

    @property
    def is_saved(self) -> StatefulPredicate:
        """Chooses the entries that checkpoints hold."""
        return self._predicate

    def offload(self, ctx: OffloadContext) -> None:
        """Move parameters and buffers to the host. Modules can not be called until `onload`."""
        for module in self._modules:
            show_shards(fsdp_units(module))
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        buffers = [buffer for module in self._modules for buffer in module.buffers()]
        self._memory.offload([*parameters, *map(compute_leaf, parameters), *buffers], ctx)

    def onload(self, ctx: OnloadContext) -> None:
        """Bring parameters and buffers back."""
        self._memory.onload(ctx)

    def is_offloaded(self) -> bool:
        """Tell whether parameters and buffers are on the host."""
        return self._memory.is_offloaded

    def state_dict(self) -> dict[str, Any]:
        """Return references to the tensors of each stage, under ``pp_<rank>_stage_<index>``."""
        return {
            self._key(index): {
                name: value for name, value in module.state_dict().items() if self._predicate(name, module)
            }
            for index, module in enumerate(self._modules)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the stages.

        Raises:
            RuntimeError: If an entry that a checkpoint holds is missing, with its name.
        """
        for index, module in enumerate(self._modules):
            key = self._key(index)
            result = module.load_state_dict(state_dict[key], strict=False)
            missing = [name for name in result.missing_keys if self._predicate(name, module)]
            if missing or result.unexpected_keys:
                raise RuntimeError(
                    f"checkpoint of {key}: missing {missing or 'nothing'}, unexpected {result.unexpected_keys or 'nothing'}."
                )

    def _key(self, index: int) -> str:
        return f"pp_{self._pp_rank}_stage_{index}"


def everything(name: str, module: nn.Module) -> bool:
    """Choose all entries of a state dict."""
    return True


def only_trainable(name: str, module: nn.Module) -> bool:
    """Choose the parameters that require a gradient, such as the adapters of a PEFT method, and all that is no parameter.

    Buffers change in training, whatever is frozen.
    """
    try:
        return module.get_parameter(name).requires_grad
    except AttributeError:
        return True
