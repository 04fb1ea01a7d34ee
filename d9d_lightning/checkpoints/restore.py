"""Bring whole states of a module and its optimizers, from memory or from files, to what a rank has of them."""
# Lightning keeps the move of states to a device to its own strategies
# pyright: reportPrivateUsage=false

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import like_parameter, local_tensor, shard_of
from d9d_lightning.checkpoints.saved_tensors import SavedTensors, load_tensors
from d9d_lightning.checkpoints.stage_optimizers import (
    GroupNames,
    StageCut,
    named_groups,
    part_of_optimizer,
    whole_groups,
)

__all__ = [
    "NAMES_KEY",
    "TRAINABLE_KEY",
    "load_model_state",
    "load_optimizer_states",
    "shard_model_state",
    "shard_optimizer_state",
]

NAMES_KEY = "parameter_names"
"""Where a loaded state of an optimizer has the names of its parameters, by group."""
TRAINABLE_KEY = "d9d_trainable_parameters"
"""Where a loaded checkpoint of a training has the names of the parameters that were not frozen."""


def error_of(action: Callable[[], None]) -> Exception | None:
    """Run what one rank does for all, and return the error that it must tell the others about instead of raising it."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # the caller raises it on all ranks
        return error
    return None


def shard_model_state(
    state_dict: Mapping[str, Any], module: nn.Module, *, elsewhere: Collection[str] = ()
) -> OrderedDict[str, Any]:
    """Return a state dict whose full tensors are cut to what this rank holds of a module. No communication.

    A tensor whose shape does not fit stays as it is, for ``load_state_dict`` to complain about.

    Args:
        state_dict: Of the whole module; `SavedTensors` are read.
        module: The module, or the part of it that this rank has.
        elsewhere: Keys to leave out, as other ranks have them.
    """
    targets = module.state_dict()
    if isinstance(state_dict, SavedTensors):
        state_dict = load_tensors([(state_dict.without(elsewhere), targets)])[0]
    sharded = OrderedDict(
        (name, _shard_like(tensor, targets.get(name))) for name, tensor in state_dict.items() if name not in elsewhere
    )
    if isinstance(state_dict, OrderedDict):
        # Versions of modules, which torch keeps in an attribute.
        vars(sharded).update(vars(state_dict))
    return sharded


def shard_optimizer_state(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict whose full tensors are cut to what this rank holds. No communication.

    Args:
        state_dict: As `torch.optim.Optimizer.state_dict` returns it, with full tensors or `SavedTensors`.
        optimizer: Holds the parameters, in the order of the state dict.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, parameters, strict=False))
    state = dict(state_dict["state"])
    # The step counter is a scalar, as a parameter may be.
    likes = {index: dict.fromkeys(set(values) - {"step"}, by_index.get(index)) for index, values in state.items()}
    saved = {index: values for index, values in state.items() if isinstance(values, SavedTensors)}
    state |= zip(saved, load_tensors([(values, likes[index]) for index, values in saved.items()]), strict=True)
    cut = {
        index: {name: _shard_like(value, likes[index].get(name)) for name, value in values.items()}
        for index, values in state.items()
    }
    return {**state_dict, "state": cut}


def _shard_like(value: Any, target: torch.Tensor | None) -> Any:  # noqa: ANN401  # states hold anything
    if not isinstance(target, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != target.shape:
        return value
    return like_parameter(shard_of(value, target).to(local_tensor(target).device, copy=True), target)


def load_model_state(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool, cut: StageCut | None = None
) -> None:
    """Load a state dict of full tensors into what this rank holds of a module.

    Without a cut there is no communication. With one, all ranks of the pipeline must call it: a key is missing if the
    whole module has it, and unexpected if no rank knows it.

    Args:
        module: The module, or the part of it that this rank has.
        state_dict: Of the whole module; `SavedTensors` are read.
        strict: Whether missing and unexpected keys are errors.
        cut: The whole module, if it is cut into pipeline stages.

    Raises:
        RuntimeError: As by ``load_state_dict``; with a cut, on all ranks of the pipeline.
    """
    if cut is None:
        module.load_state_dict(shard_model_state(state_dict, module), strict=strict)
        return
    missing: list[str] = []
    unexpected: list[str] = []

    def load() -> None:
        elsewhere = set(cut.state_names).difference(module.state_dict())
        # None where a user's own load_state_dict returns nothing.
        keys = module.load_state_dict(shard_model_state(state_dict, module, elsewhere=elsewhere), strict=False)
        missing.extend((keys or ((), ()))[0])
        unexpected.extend((keys or ((), ()))[1])

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
    device: torch.device | None = None,
) -> None:
    """Load the states of whole optimizers into what this rank has of them.

    Parameters are found by name where a state has names, under `NAMES_KEY`, and else by their position.

    Without a cut there is no communication. With one, all ranks of the pipeline must call it.

    Args:
        states: State dicts, one for each optimizer, with full tensors or `SavedTensors`.
        optimizers: Optimizers of the module.
        module: Gives parameters their names.
        cut: The whole module, if it is cut into pipeline stages.
        device: Where their tensors go; None leaves them where they are.

    Raises:
        ValueError: If there are other optimizers, groups or parameters than were saved.
    """
    if len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint has the states of {len(states)} optimizers, and configure_optimizers() makes "
            f"{len(optimizers)}. Load it with the optimizers that it was saved with."
        )
    own = [named_groups(module, optimizer) for optimizer in optimizers]
    whole = own if cut is None else whole_groups(own, cut)
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        names = state.get(NAMES_KEY)
        state = {key: value for key, value in state.items() if key != NAMES_KEY}
        if names is not None:
            state = _in_order(state, names, whole[number], number)
        if cut is not None:
            state = part_of_optimizer(state, own[number], whole[number], number)
        _tell_other_rates(optimizer, state, number)
        optimizer.load_state_dict(shard_optimizer_state(state, optimizer))
    if device is not None:
        _optimizers_to_device(optimizers, device)


def _in_order(state: dict[str, Any], saved: GroupNames, wanted: GroupNames, number: int) -> dict[str, Any]:
    """Return the state of an optimizer with the parameters in the order that they have now."""
    groups = state["param_groups"]
    if [set(names) for names in saved] != [set(names) for names in wanted]:
        raise ValueError(_other_parameters(saved, wanted, number))
    index_of = {
        name: index
        for names, group in zip(saved, groups, strict=True)
        for name, index in zip(names, group["params"], strict=True)
    }
    ordered = [
        {**group, "params": [index_of[name] for name in names]} for names, group in zip(wanted, groups, strict=True)
    ]
    return {**state, "param_groups": ordered}


def _other_parameters(saved: GroupNames, wanted: GroupNames, number: int) -> str:
    group_of = [{name: index for index, names in enumerate(groups) for name in names} for groups in (saved, wanted)]
    before, now = group_of
    lines = [f"{name} is in group {before[name]} there" for name in before if name not in now]
    lines += [f"{name} is in group {now[name]} of the module's, and not there" for name in now if name not in before]
    lines += [
        f"{name} was in group {group}, and is in group {now[name]}"
        for name, group in before.items()
        if now.get(name, group) != group
    ]
    lines = lines or [f"{len(saved)} groups there, {len(wanted)} in the module's"]
    more = f"\n- and {len(lines) - 10} more" if len(lines) > 10 else ""
    return (
        f"optimizer {number} of the checkpoint has other parameters than that of the module:\n- "
        + "\n- ".join(lines[:10])
        + more
        + f"\nLoad it with the optimizers that it was saved with. To take them by their position, as from a plain file, "
        f"delete {NAMES_KEY!r} from each of checkpoint['optimizer_states'] in on_load_checkpoint."
    )


def _tell_other_rates(optimizer: Optimizer, state: Mapping[str, Any], number: int) -> None:
    """Tell which learning rate counts where the module asks for another than the checkpoint has."""
    for index, (now, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        # A schedule has moved the rate itself.
        key = "initial_lr" if "initial_lr" in now and "initial_lr" in saved else "lr"
        if key in now and key in saved and float(now[key]) != float(saved[key]):
            rank_zero_info(
                f"optimizer {number}, group {index}: {key} is {float(saved[key]):g} as in the checkpoint, not "
                f"{float(now[key]):g} as the optimizer had it before. Change it after loading to have another one."
            )
