"""Parallel styles of our own, beside those of torch."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from d9d.module.block.moe import MoELayer
from d9d.module.block.moe.all_to_all import check_expert_parallel
from d9d.module.parallelism.dropout_mask import drop_part
from d9d.module.parallelism.replicate import distribute_with_leaves


class ShardMoESparseExpertsParallel(ParallelStyle):
    """Distributes the experts of a layer, and nothing else of it; see `parallelize_expert_parallel`.

    Args:
        shard_dim_name: Name of the mesh dimension to distribute along.
    """

    def __init__(self, shard_dim_name: str) -> None:
        super().__init__()
        self._shard_dim_name = shard_dim_name

    def apply(self, module: MoELayer, device_mesh: DeviceMesh) -> None:
        """Distribute the experts of a layer, in place.

        Raises:
            ValueError: If the mesh has no such dimension, or its size does not divide the number of experts.
        """
        names = device_mesh.mesh_dim_names or ()
        if self._shard_dim_name not in names:
            raise ValueError(
                f"the mesh of the experts has the dimensions {names}, not {self._shard_dim_name!r}. Pass the mesh of "
                f"the expert domain, or name one of them."
            )
        mesh_dim = names.index(self._shard_dim_name)
        num_ranks, rank = device_mesh.size(mesh_dim), device_mesh.get_local_rank(mesh_dim)
        check_expert_parallel(module.num_experts, num_ranks)
        placements = [Shard(0) if name == self._shard_dim_name else Replicate() for name in names]

        def own_experts(parameter: nn.Parameter) -> DTensor:
            # A copy, since a view would keep the experts of all ranks in memory.
            local = parameter.detach().chunk(num_ranks)[rank].clone()
            return DTensor.from_local(local, device_mesh, placements, run_check=False)

        distribute_with_leaves(module.grouped_experts, own_experts)
        module.enable_distributed_communicator(device_mesh.get_group(mesh_dim))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        if not isinstance(module, MoELayer):
            raise NotImplementedError(
                f"{type(self).__name__} distributes the experts of an MoELayer, not of a {type(module).__name__}."
            )
        self.apply(module, device_mesh)
        return module


class ReplicatedHeadsParallel(ParallelStyle):
    """Computes a projection to heads on every rank, and keeps the one head that the rank's queries share.

    For more ranks than heads: ranks ``r * R / heads`` and so on share a head. The weight stays whole, and its gradient
    is the sum over the ranks. Takes a DTensor that is the same on all ranks, and gives a plain tensor.

    Args:
        num_heads: Number of heads, which divides the number R of ranks.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        head = device_mesh.get_local_rank() * self._num_heads // device_mesh.size()
        num_heads = self._num_heads

        def keep_own_head(_: nn.Module, args: tuple[Any, ...], output: DTensor) -> Any:  # noqa: ANN401  # DTensor is untyped
            size = output.shape[-1] // num_heads
            return output.to_local(grad_placements=[Partial()]).narrow(-1, head * size, size)

        _distribute_parameters(module, device_mesh, Replicate())
        module.register_forward_hook(keep_own_head)
        return module


class ReplicatedParallel(ParallelStyle):
    """Keeps a layer whole on every rank, for inputs that are DTensors; its gradients are sums over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        _distribute_parameters(module, device_mesh, Replicate())
        return module


class DropoutOfParts(ParallelStyle):
    """Lets a dropout draw a mask of its own on each rank, of which each has other features or tokens.

    See [Note: random numbers of parts].
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        if not isinstance(module, nn.Dropout):
            raise NotImplementedError(f"{type(self).__name__} is for nn.Dropout, not for a {type(module).__name__}.")
        # The module itself, since nobody knows where else it is held.
        module.__class__ = _DropoutOfParts
        vars(module)["rank"] = device_mesh.get_local_rank()
        return module


class _DropoutOfParts(nn.Dropout):
    """See [Note: random numbers of parts]."""

    rank: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name of nn.Dropout
        if not self.training or self.p == 0.0:
            return input
        return drop_part(input, self.p, self.rank, inplace=self.inplace)


class ToLocalParallel(ParallelStyle):
    """Distributes the parameters of a module, whose code computes with their local tensors.

    As under `parallelize_replicate`, ``module.weight`` is a plain tensor and ``module.parameters()`` yields DTensors. The local
    gradient is what autograd gives for the local tensor; the gradient manager then sums it over the mesh dimensions of ranks
    with different data along which the parameter is replicated, as all domains of a job say. What is not so is refused.

    No communication: values must be equal on all ranks.

    Args:
        param_placement: `Shard` or `Replicate` for each dimension of the mesh.
        grad_placement: What the local gradients are together, for each dimension of the mesh: `Partial` where a parameter is
            replicated over ranks with different data, `Replicate` over ``tp``, whose ranks compute the same, and the
            `Shard` of the parameter.
    """

    def __init__(self, param_placement: tuple[Placement, ...], grad_placement: tuple[Placement, ...]) -> None:
        super().__init__()
        self._param_placement = tuple(param_placement)
        self._grad_placement = tuple(grad_placement)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        expected = tuple(
            placement if isinstance(placement, Shard) else Replicate() if name == "tp" else Partial()
            for name, placement in zip(self._names(device_mesh), self._param_placement, strict=False)
        )
        is_known = all(isinstance(placement, Shard | Replicate) for placement in self._param_placement)
        if len(self._param_placement) != device_mesh.ndim or not is_known or self._grad_placement != expected:
            raise ValueError(
                f"parameters {self._param_placement} with gradients {self._grad_placement} over the mesh dimensions "
                f"{device_mesh.mesh_dim_names}: give Shard or Replicate for each dimension, and gradients that are the same "
                f"Shard, Partial where a parameter is replicated, and Replicate where it is so over 'tp': {expected}."
            )

        def distribute(parameter: nn.Parameter) -> DTensor:
            return distribute_tensor(parameter.detach(), device_mesh, self._param_placement, src_data_rank=None)

        distribute_with_leaves(module, distribute)
        return module

    @staticmethod
    def _names(mesh: DeviceMesh) -> tuple[str, ...]:
        return mesh.mesh_dim_names or ("",) * mesh.ndim


class SinksParallel(ParallelStyle):
    """Splits the learned sinks of attention by heads, see `AttentionSinks`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        num_ranks = device_mesh.size()

        def count_all_heads(_: nn.Module, args: tuple[int]) -> tuple[int]:
            return (args[0] * num_ranks,)

        def keep_own_sinks(_: nn.Module, args: tuple[int], output: DTensor) -> Any:  # noqa: ANN401  # DTensor is untyped
            return output.to_local()

        _distribute_parameters(module, device_mesh, Shard(0))
        module.register_forward_pre_hook(count_all_heads)
        module.register_forward_hook(keep_own_sinks)
        return module


def _distribute_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Distribute a module's own parameters, without communication: values are equal on all ranks."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))
