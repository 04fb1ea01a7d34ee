"""Run an optimizer on the local shards of its parameters, while it keeps speaking of DTensors to everybody else."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.core.placement import compute_leaf, is_sharded, like_parameter, local_tensor, shard_of
from d9d.optim.stochastic import StochasticAdamW

_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    StochasticAdamW,
)
"""Optimizers whose update of an element depends on that element alone, so that a shard can be updated by itself."""

_OptimizerState = dict[str, Any]
"""A torch optimizer's state of one parameter, or its state dict: any values, by torch's own definition."""


def localize_optimizer(optimizer: Optimizer) -> bool:
    """Let ``optimizer.step()`` work on plain local tensors instead of DTensors, in place.

    For 200 parameters a fused AdamW takes 0.8 ms on local tensors and 3 to 17 ms through DTensor's dispatch. Between
    steps nothing changes for the outside: ``param_groups`` hold the DTensors, also inside a closure, and
    ``state_dict()`` and ``load_state_dict()`` speak DTensors, or full tensors when loading.

    An optimizer that looks at more than one element at a time (Muon, Adafactor, LBFGS, a subclass we do not know)
    would compute something else on a shard; it keeps running on DTensors if any parameter is sharded.

    Args:
        optimizer: Optimizer over DTensors and plain parameters.

    Returns:
        Whether the optimizer now runs on local tensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return False
    if type(optimizer) not in _ELEMENTWISE and any(is_sharded(parameter) for parameter in parameters):
        return False
    _LocalShards(optimizer)
    return True


class _LocalShards:
    """Swaps the DTensors of an optimizer for local tensors while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []
        self._outer_state: defaultdict[torch.Tensor, _OptimizerState] | None = None
        self._local_state: defaultdict[torch.Tensor, _OptimizerState] = defaultdict(dict)
        # Adagrad makes its state when it is built.
        for parameter, values in optimizer.state.items():
            values.update((name, _unwrap(name, value, parameter)) for name, value in values.items())
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(_wrap_state)
        optimizer.register_load_state_dict_pre_hook(_unwrap_state)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Any: the arguments are those of the user's optimizer, itself first. Torch's all take the closure, and no more.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if optimizer.state is self._local_state:
            # The last step has raised in between.
            self._exit(optimizer)
        self._enter(optimizer)
        if closure is None:
            return args, kwargs
        return (optimizer,), {**kwargs, "closure": self._outside(optimizer, closure)}

    def _outside(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Run the closure, which holds the user's code and the backward pass, with the DTensors in place."""

        def run() -> Any:  # noqa: ANN401  # whatever the closure returns
            self._exit(optimizer)
            result = closure()
            self._enter(optimizer)
            return result

        return run

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._exit(optimizer)

    def _enter(self, optimizer: Optimizer) -> None:
        if [id(group["params"]) for group in optimizer.param_groups] != [id(outer) for outer, _ in self._groups]:
            # First step, or parameters were added or loaded.
            self._groups = [
                (group["params"], [_local_parameter(parameter) for parameter in group["params"]])
                for group in optimizer.param_groups
            ]
            self._outer_state = None
        for group, (outer, local) in zip(optimizer.param_groups, self._groups, strict=True):
            if len(outer) != len(local):
                local[:] = [_local_parameter(parameter) for parameter in outer]
                self._outer_state = None
            for parameter, shard in zip(outer, local, strict=True):
                _follow(parameter, shard)
            group["params"] = local
        if optimizer.state is not self._outer_state:
            self._outer_state = optimizer.state
            inside: dict[torch.Tensor, torch.Tensor] = {
                parameter: shard for outer, local in self._groups for parameter, shard in zip(outer, local, strict=True)
            }
            self._local_state = defaultdict(
                dict, {inside.get(key, key): value for key, value in optimizer.state.items()}
            )
        optimizer.state = self._local_state

    def _exit(self, optimizer: Optimizer) -> None:
        assert self._outer_state is not None  # _enter has set it
        for group, (outer, local) in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = outer
            for parameter, shard in zip(outer, local, strict=True):
                if shard is not parameter and shard is not compute_leaf(parameter):
                    shard.grad = None
        if len(self._local_state) != len(self._outer_state):
            outside: dict[torch.Tensor, torch.Tensor] = {
                shard: parameter for outer, local in self._groups for parameter, shard in zip(outer, local, strict=True)
            }
            # Some optimizers (LBFGS) keep their state under the parameter they were given, not under that of the group.
            self._outer_state.update((outside.get(key, key), value) for key, value in self._local_state.items())
        optimizer.state = self._outer_state


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the tensor to update instead of a parameter: a leaf over the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    leaf = compute_leaf(parameter)
    return leaf if leaf is not parameter else nn.Parameter(local_tensor(parameter), parameter.requires_grad)


def _follow(parameter: nn.Parameter, shard: nn.Parameter) -> None:
    """Give a shard the current memory and gradient of its parameter."""
    if shard is parameter:
        return
    local = local_tensor(parameter)
    if shard.data_ptr() != local.data_ptr():
        shard.data = local
    grad = parameter.grad
    if grad is None:
        shard.grad = None
    elif shard.grad is not local_tensor(grad):
        shard.grad_dtype = grad.dtype
        shard.grad = local_tensor(grad)


def _wrap_state(optimizer: Optimizer, state_dict: _OptimizerState) -> _OptimizerState:
    """Give the tensors of a state dict the layouts of their parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: _wrap(name, value, parameters[index]) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _unwrap_state(optimizer: Optimizer, state_dict: _OptimizerState) -> _OptimizerState:
    """Reduce DTensors and full tensors of a state dict to the shards of this rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, parameters, strict=False))
    state = {
        # What no parameter here answers to is left for torch, which refuses groups of another size.
        index: {name: _unwrap(name, value, by_index.get(index)) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _is_per_element(name: str, value: object, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == shape


def _wrap(name: str, value: Any, parameter: nn.Parameter) -> Any:  # noqa: ANN401  # optimizer state is anything
    if not isinstance(value, DTensor) and _is_per_element(name, value, local_tensor(parameter).shape):
        return like_parameter(value, parameter)
    return value


def _unwrap(name: str, value: Any, parameter: torch.Tensor | None) -> Any:  # noqa: ANN401  # optimizer state is anything
    if not isinstance(parameter, DTensor):
        return value
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) != (parameter.device_mesh, parameter.placements):
            value = value.redistribute(parameter.device_mesh, parameter.placements)
        return local_tensor(value)
    if _is_per_element(name, value, parameter.shape):
        return shard_of(value, parameter).clone()
    return value
