"""Parallel styles of our own, beside those of torch."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from d9d.module.block.moe import MoELayer
from d9d.module.block.moe.all_to_all import check_expert_parallel
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
