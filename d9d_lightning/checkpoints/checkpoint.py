"""Lightning checkpoints that do not depend on the mesh: plain files with full tensors."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import like_parameter, local_tensor, shard_of
from d9d_lightning.checkpoints.stage_checkpoint import full_tensor, merge_stages
from d9d_lightning.checkpoints.stage_optimizers import (
    StageCut,
    check_optimizers,
    named_groups,
    part_of_optimizer,
    set_up_together,
    whole_groups,
)

__all__ = [
    "Checkpoint",
    "StageCut",
    "check_optimizers",
    "gather_checkpoint",
    "load_model_state",
    "load_optimizer_states",
    "save_on_first_rank",
    "set_up_together",
    "shard_model_state",
    "shard_optimizer_state",
]

Checkpoint = dict[str, Any]
"""Whatever Lightning, its callbacks and the user's hooks put there."""


@torch.no_grad()
def gather_checkpoint(
    checkpoint: Checkpoint,
    *,
    keep: bool,
    module: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    cut: StageCut | None = None,
) -> Checkpoint:
    """Return a checkpoint with each distributed tensor replaced by the full tensor on the host.

    One tensor at a time, in the order of the mapping. All ranks must call it with the same structure; it blocks the
    host. With pipeline stages, see also `merge_stages`: states of modules and optimizers come from all stages, everything
    else from rank 0.

    Args:
        checkpoint: What Lightning has dumped, with tensors as they are on this rank.
        keep: Whether this rank wants the result; others take part and get empty places. Rank 0 with pipeline stages.
        module: The module that the optimizers belong to.
        optimizers: Those in ``checkpoint["optimizer_states"]``.
        cut: The whole module, if it is cut into pipeline stages.
    """
    if cut is None:
        return _gather(checkpoint, keep=keep)
    names = (
        [named_groups(module, optimizer) for optimizer in optimizers]
        if module is not None and "optimizer_states" in checkpoint
        else []
    )
    merged, entries = merge_stages(checkpoint, names, cut)
    rest = _gather({entry: content for entry, content in checkpoint.items() if entry not in entries}, keep=keep)
    ordered = dict.fromkeys([*checkpoint, *merged])
    return {entry: merged[entry] if entry in merged else rest.get(entry) for entry in ordered}


def _gather(checkpoint: Checkpoint, *, keep: bool) -> Checkpoint:
    gathered = apply_to_collection(checkpoint, DTensor, _full_on_host, keep=keep)
    for entry, content in checkpoint.items():
        # Versions of modules, which torch keeps in an attribute of a state dict.
        if isinstance(content, OrderedDict) and isinstance(gathered[entry], OrderedDict):
            vars(gathered[entry]).update(vars(content))
    return gathered


def _full_on_host(tensor: DTensor, *, keep: bool) -> torch.Tensor | None:
    full = full_tensor(tensor)
    return full.cpu() if keep else None


def error_of(action: Callable[[], None]) -> Exception | None:
    """Run what one rank does for all, and return the error that it must tell the others about instead of raising it."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # the caller raises it on all ranks
        return error
    return None


def save_on_first_rank(
    save: Callable[[], None], path: object, *, is_first: bool, broadcast: Callable[[str | None], str | None]
) -> None:
    """Let rank 0 write a file. All ranks must call it.

    Args:
        save: Writes it.
        path: Where, for the message.
        is_first: Whether this is rank 0.
        broadcast: Returns the object of rank 0 on all ranks.

    Raises:
        RuntimeError: On all ranks, if it could not be written.
    """
    failure = error_of(save) if is_first else None
    reason = broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
    if reason is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint {path}: {reason}") from failure


def shard_model_state(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """Return a state dict whose full tensors are cut to what this rank holds of a module. No communication.

    A tensor whose shape does not fit stays as it is, for ``load_state_dict`` to complain about.
    """
    targets = module.state_dict()
    sharded = OrderedDict((name, _shard_like(tensor, targets.get(name))) for name, tensor in state_dict.items())
    if isinstance(state_dict, OrderedDict):
        # Versions of modules, which torch keeps in an attribute.
        vars(sharded).update(vars(state_dict))
    return sharded


def shard_optimizer_state(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict whose full tensors are cut to what this rank holds. No communication.

    Args:
        state_dict: As `torch.optim.Optimizer.state_dict` returns it, with full tensors.
        optimizer: Holds the parameters, in the order of the state dict.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, parameters, strict=False))
    state = {
        index: {
            # The step counter is a scalar, as a parameter may be.
            name: value if name == "step" else _shard_like(value, by_index.get(index))
            for name, value in values.items()
        }
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _shard_like(value: Any, target: torch.Tensor | None) -> Any:  # noqa: ANN401  # states hold anything
    if not isinstance(target, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != target.shape:
        return value
    return like_parameter(shard_of(value, target).to(local_tensor(target).device, copy=True), target)


def load_model_state(
    module: nn.Module, state_dict: Mapping[str, torch.Tensor], *, strict: bool, cut: StageCut | None = None
) -> None:
    """Load a state dict of full tensors into what this rank holds of a module.

    Without a cut there is no communication. With one, all ranks of the pipeline must call it: a key is missing if the
    whole module has it, and unexpected if no rank knows it.

    Args:
        module: The module, or the part of it that this rank has.
        state_dict: Of the whole module.
        strict: Whether missing and unexpected keys are errors.
        cut: The whole module, if it is cut into pipeline stages.

    Raises:
        RuntimeError: As by ``load_state_dict``; with a cut, on all ranks of the pipeline.
    """
    sharded = shard_model_state(state_dict, module)
    if cut is None:
        module.load_state_dict(sharded, strict=strict)
        return
    for name in set(cut.state_names).difference(module.state_dict()):
        sharded.pop(name, None)
    missing: list[str] = []
    unexpected: list[str] = []

    def load() -> None:
        # None where a user's own load_state_dict returns nothing.
        keys = module.load_state_dict(sharded, strict=False) or ((), ())
        missing.extend(keys[0])
        unexpected.extend(keys[1])

    failure = error_of(load)
    reports = all_gather_object((missing, unexpected, None if failure is None else str(failure)), cut.group)
    texts = list(dict.fromkeys(text for _, _, text in reports if text is not None))
    if strict:
        all_missing = {name for names, _, _ in reports for name in names}
        all_unexpected = set(reports[0][1]).intersection(*(names for _, names, _ in reports))
        texts += [
            f"{kind} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}."
            for kind, names in (("Missing", all_missing), ("Unexpected", all_unexpected))
            if names
        ]
    if texts:
        lines = "\n\t".join(texts)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{lines}") from failure


def load_optimizer_states(
    states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Optimizer],
    *,
    module: nn.Module,
    cut: StageCut | None = None,
) -> None:
    """Load the states of whole optimizers, with full tensors, into what this rank has of them.

    Without a cut there is no communication. With one, all ranks of the pipeline must call it.

    Args:
        states: State dicts, one for each optimizer.
        optimizers: Optimizers of the module.
        module: Gives parameters their names.
        cut: The whole module, if it is cut into pipeline stages.

    Raises:
        ValueError: If the file has other numbers of groups or parameters.
    """
    if cut is not None:
        own = [named_groups(module, optimizer) for optimizer in optimizers]
        whole = whole_groups(own, cut)
        states = [
            part_of_optimizer(state, own[number], whole[number], number)
            for number, state in enumerate(states[: len(own)])
        ]
    for optimizer, state in zip(optimizers, states, strict=False):
        optimizer.load_state_dict(shard_optimizer_state(state, optimizer))
