"""Keep the plain tensors that a module computes with bound to its replicated parameters."""
# torch reads parameters from these attributes, and so do we (torch 2.13)
# pyright: reportPrivateUsage=false

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.placement import compute_leaf, local_tensor, set_compute_leaf


class ParameterSlots(dict[str, nn.Parameter | None]):
    """The ``_parameters`` of a module that computes with leaves of some of them.

    [Note: shadowed attributes]
    ``nn.Module`` looks a parameter up in ``_parameters`` only if the instance dictionary has no such key. The leaf goes
    into the instance dictionary, so that ``module.weight`` is the leaf at the speed of an attribute, also when
    activation checkpointing runs the module again in the backward pass. Whoever exchanges a parameter writes to
    ``_parameters`` (assignment, ``load_state_dict``, ``torch.func.functional_call``, ``deepcopy``), and the shadow
    follows from here. What changes a parameter in place is noticed by `ReplicatedParameters`.
    """

    def __init__(self, owner: nn.Module, names: set[str]) -> None:
        """Take over the parameters of a module.

        Args:
            owner: The module.
            names: Its parameters that are replicated, and computed with as plain tensors.
        """
        super().__init__()
        self._owner = owner
        known = owner._parameters
        self._names = names | known._names if isinstance(known, ParameterSlots) else names
        for name, parameter in owner._parameters.items():
            self[name] = parameter

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        """Put a parameter in place, and its leaf if it is a replicated one."""
        super().__setitem__(name, parameter)
        if name in self._names and isinstance(parameter, DTensor):
            _bind(self._owner, name, parameter)
        else:
            vars(self._owner).pop(name, None)
            _renew_lists(self._owner)

    def __delitem__(self, name: str) -> None:
        """Remove a parameter and its leaf."""
        super().__delitem__(name)
        vars(self._owner).pop(name, None)


class ReplicatedParameters:
    """Forward pre-hook that lets leaves follow what was done to their parameters in place.

    That is ``module.to(...)``, which exchanges the local tensor, and ``requires_grad_``.
    """

    def __init__(self, slots: list[tuple[nn.Module, str]]) -> None:
        """Take the places of the replicated parameters: owner module and attribute name."""
        self._slots = slots

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Rebind what has changed since the last call. Breaks the graph of a compiled module that it is inside of."""
        if torch.compiler.is_compiling():
            _outside_of_graphs(self._follow)
        else:
            self._follow()

    def _follow(self) -> None:
        for owner, name in self._slots:
            parameter = owner._parameters.get(name)
            if isinstance(parameter, DTensor) and not _is_bound(owner, name, parameter):
                _bind(owner, name, parameter)

    def bind(self) -> None:
        """Rebind all leaves."""
        for owner, name in self._slots:
            parameter = owner._parameters.get(name)
            if isinstance(parameter, DTensor):
                _bind(owner, name, parameter)


@torch.compiler.disable
def _outside_of_graphs(call: Callable[[], None]) -> None:
    # The compiler knows nothing of addresses.
    call()


def bind_compute_leaves(module: nn.Module) -> None:
    """Bind the leaves of all replicated parameters below a module, e.g. after its memory was allocated anew."""
    for child in module.modules():
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, ReplicatedParameters):
                hook.bind()


def _is_bound(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    leaf = vars(owner).get(name)
    return (
        leaf is not None
        and leaf is compute_leaf(parameter)
        and leaf.data_ptr() == local_tensor(parameter).data_ptr()
        and leaf.requires_grad == parameter.requires_grad
    )


def _bind(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Shadow a parameter by a leaf over its memory."""
    leaf = compute_leaf(parameter)
    local = local_tensor(parameter)
    if leaf is parameter or leaf.is_meta != local.is_meta:
        leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
        set_compute_leaf(parameter, leaf)
    # The leaf object stays, since gradient hooks hang on it.
    leaf.data = local
    leaf.requires_grad_(parameter.requires_grad)
    vars(owner)[name] = leaf
    _renew_lists(owner)


def _renew_lists(owner: nn.Module) -> None:
    """Some modules keep lists of their parameters beside the attributes."""
    if isinstance(owner, nn.RNNBase) and "_flat_weights" in vars(owner):
        weights = owner._flat_weights_names
        owner._flat_weights = [getattr(owner, weight, None) for weight in weights]  # introspection: as torch does
