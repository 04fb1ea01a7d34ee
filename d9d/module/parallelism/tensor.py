"""Split single layers over the ranks of a tensor-parallel mesh, with torch's parallel styles."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import parallelize_module as apply_style
from torch.distributed.tensor.placement_types import Placement


@runtime_checkable
class SplitsItself(Protocol):
    """A layer around one that a parallel style knows, such as a layer with an adapter, which has to be split with it."""

    def split_over_ranks(self, style: ParallelStyle, mesh: DeviceMesh) -> None:
        """Do what `parallelize_tensor` promises for the layer as a whole."""
        ...

    def split_dims(self, dim: int) -> Mapping[str, int | None]:
        """Return along which dimension each parameter, by its name, is split where the weight is along `dim`; None: whole."""
        ...


def parallelize_tensor(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Split a layer over a one-dimensional mesh, in place, before FSDP or replication takes its parameters.

    Its parameters become DTensors over the mesh, and its gradients come in their layouts (`align_gradients`). No
    communication: values must be equal on all ranks of the mesh, as must be the inputs of each call.

    Args:
        module: Layer to change; on the meta device or with values.
        style: One of torch's styles, or one like them.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.

    Raises:
        NotImplementedError: If the style does not know this class of layer.
        ValueError: If the mesh has more than one dimension.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_tensor splits over one mesh dimension, got {mesh.mesh_dim_names}. Pass one of them."
        )
    if isinstance(module, SplitsItself):
        module.split_over_ranks(style, mesh)
        return
    is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    apply_style(module, mesh, style, src_data_rank=None)
    for name, parameter in module.named_parameters():
        # Not all styles keep the flag (torch 2.13: SequenceParallel).
        parameter.requires_grad_(is_trained.get(name, parameter.requires_grad))
    align_gradients(module.parameters())


def align_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of DTensors arrive in the layouts of their parameters; plain tensors are left alone.

    Autograd hands over what it has computed, and that may be a partial sum: a norm over a part of the sequence sees a
    part of the gradient of its weight. Whoever looks at local tensors (buckets, norms, optimizers) would take it for
    the whole.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        is_trained = parameter.requires_grad
        # A hook can be hung on a trained tensor only, and stays if that changes.
        parameter.requires_grad_(True)
        parameter.register_hook(_align_to(parameter.placements))
        parameter.requires_grad_(is_trained)


def _align_to(placements: Sequence[Placement]) -> Callable[[torch.Tensor], torch.Tensor]:
    # Not the parameter itself: it would keep itself alive through its hook.
    def align(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    return align
