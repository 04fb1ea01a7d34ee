"""State that belongs to the job and not to a rank."""

from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import DistributedContext

__all__ = ["load_state_dict_main_process", "state_dict_main_process"]

_KEY = "main_process"


def state_dict_main_process(dist_context: DistributedContext, obj: Stateful) -> dict[str, Any]:
    """Return the state of an object of the main rank; other ranks add nothing to a checkpoint."""
    return {_KEY: obj.state_dict()} if dist_context.is_main_process else {}


def load_state_dict_main_process(dist_context: DistributedContext, obj: Stateful, state_dict: dict[str, Any]) -> None:
    """Restore an object of the main rank from what `state_dict_main_process` returned there."""
    if dist_context.is_main_process:
        obj.load_state_dict(state_dict[_KEY])
