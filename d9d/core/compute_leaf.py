"""Keep the plain tensors that a module computes with bound to its replicated parameters."""
# torch reads parameters from these attributes, and so do we (torch 2.13)
# pyright: reportPrivateUsage=false

from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.placement import compute_leaf, local_tensor, set_compute_leaf


class ReplicatedParameters:
    """Forward pre-hook that keeps the compute leaves of a module bound to its parameters.

    [Note: shadowed attributes]
    ``nn.Module`` finds a parameter in ``_parameters`` only if the instance dictionary has no such key. The leaf goes
    into the instance dictionary, so that ``module.weight`` is the leaf at the speed of an attribute, also when
    activation checkpointing runs the module again in the backward pass. Assigning a parameter removes the shadow.
    What replaces tensors behind our back is noticed at the next forward pass: ``module.to(...)``, ``deepcopy``,
    ``torch.func.functional_call``, ``requires_grad_``.
    """

    def __init__(self, slots: list[tuple[nn.Module, str]]) -> None:
        """Take the places of the replicated parameters: owner module and attribute name."""
        self._slots = slots

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Rebind what has changed since the last call."""
        self.bind()

    def bind(self) -> None:
        """Make every slot compute with a leaf over its parameter's memory."""
        for owner, name in self._slots:
            parameter = owner._parameters[name]
            if not isinstance(parameter, DTensor):
                # functional_call or the user put a plain tensor there: compute with that.
                vars(owner).pop(name, None)
                continue
            leaf = compute_leaf(parameter)
            if (
                vars(owner).get(name) is not leaf
                or leaf.data_ptr() != parameter._local_tensor.data_ptr()
                or leaf.requires_grad != parameter.requires_grad
            ):
                self._rebind(owner, name, parameter)

    @staticmethod
    def _rebind(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
        leaf = compute_leaf(parameter)
        local = local_tensor(parameter)
        if leaf is parameter or leaf.is_meta != local.is_meta:
            leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
            set_compute_leaf(parameter, leaf)
        # The leaf object stays, since gradient hooks hang on it.
        leaf.data = local
        leaf.requires_grad_(parameter.requires_grad)
        vars(owner)[name] = leaf
        if isinstance(owner, nn.RNNBase):
            weights = owner._flat_weights_names
            owner._flat_weights = [getattr(owner, weight, None) for weight in weights]  # introspection: as torch does


def bind_compute_leaves(module: nn.Module) -> None:
    """Bind the leaves of all replicated parameters below a module, e.g. after its memory was allocated anew."""
    for child in module.modules():
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, ReplicatedParameters):
                hook.bind()
