"""The norm of all gradients of a job, whatever mixture of layouts its parameters have."""
# torch exports its foreach operations under private names only (torch 2.13)
# pyright: reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false

import dataclasses
import math
from collections.abc import Iterable
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.device import accumulator_dtype
from d9d.core.placement import groups_where, local_tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients:
    """Gradients on this rank whose parameters are sharded over the same groups."""

    shard_groups: tuple[dist.ProcessGroup, ...]
    """Groups over which each tensor is cut in parts; empty for plain and replicated parameters, which count once."""
    tensors: list[torch.Tensor]
    """Local tensors of any shape, on one device. May be empty on some ranks only."""
    device: torch.device
    """Device of the tensors."""
    dtype: torch.dtype
    """Type of the group's norm, the same on all ranks."""
    is_counted: bool = True
    """Whether they are part of the norm. Copies of what counts elsewhere are not, and are scaled all the same."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardedAlike:
    """Parameters that are sharded over the same groups."""

    shard_groups: tuple[dist.ProcessGroup, ...]
    """Groups over which each parameter is cut in parts."""
    parameters: tuple[nn.Parameter, ...]
    """At least one parameter."""
    device: torch.device
    """Device of the gradients."""
    dtype: torch.dtype
    """Type that holds the norm of all of them: that of the gradients, and at least float32."""

    @classmethod
    def of(cls, shard_groups: tuple[dist.ProcessGroup, ...], parameters: list[nn.Parameter]) -> Self:
        """Look up, once, what the parameters have in common."""
        dtype = torch.float32
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.grad_dtype or parameter.dtype)
        return cls(shard_groups=shard_groups, parameters=tuple(parameters), device=parameters[0].device, dtype=dtype)

    def with_tensors(self, tensors: list[torch.Tensor], *, is_counted: bool = True) -> LocalGradients:
        """Return the given gradients of these parameters."""
        return LocalGradients(
            shard_groups=self.shard_groups,
            tensors=tensors,
            device=self.device,
            dtype=self.dtype,
            is_counted=is_counted,
        )

    def local_gradients(self) -> LocalGradients:
        """Return the gradients that the parameters have now."""
        return self.with_tensors(
            [local_tensor(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ParametersForNorm:
    """Parameters grouped by the process groups that they are sharded over."""

    groups: tuple[ShardedAlike, ...]


def group_parameters_for_norm(parameters: Iterable[nn.Parameter]) -> ParametersForNorm:
    """Group parameters for `clip_grad_norm_distributed_`. Do this once, not each step.

    Args:
        parameters: Plain tensors and DTensors of any meshes. All ranks pass the same parameters in the same order.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        groups.setdefault(groups_where(parameter, replicated=False), []).append(parameter)
    return ParametersForNorm(tuple(ShardedAlike.of(key, members) for key, members in groups.items()))


def clip_grad_norm_distributed_(
    parameter_groups: ParametersForNorm, max_norm: float | None, norm_type: float, pp_mesh: DeviceMesh | None
) -> torch.Tensor:
    """Compute the norm over all gradients of the job as if they were one vector, and scale them down to a limit.

    A sharded gradient counts with all its parts, a replicated or plain one once. All ranks of the meshes must call it;
    every rank gets the same norm and so takes the same decision, also when it is not finite on one of them. One
    collective per distinct set of shard groups; the host does not wait for the device.

    Args:
        parameter_groups: What to clip, grouped once by `group_parameters_for_norm`.
        max_norm: Limit; gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``. None measures only.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value, where a NaN counts as infinite.
        pp_mesh: One-dimensional mesh of pipeline ranks, whose stages count together.

    Returns:
        The norm before clipping, a scalar on the device of the gradients.
    """
    gradients = [group.local_gradients() for group in parameter_groups.groups]
    return clip_local_gradients_(gradients, max_norm, norm_type, pp_mesh)


@torch.no_grad()
def clip_local_gradients_(
    gradients: list[LocalGradients], max_norm: float | None, norm_type: float, pp_mesh: DeviceMesh | None
) -> torch.Tensor:
    """Do what `clip_grad_norm_distributed_` does, on local tensors."""
    norm = _total_norm(gradients, norm_type, pp_mesh)
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for part in gradients:
            if part.tensors:
                torch._foreach_mul_(part.tensors, factor)
    return norm


def _total_norm(gradients: list[LocalGradients], norm_type: float, pp_mesh: DeviceMesh | None) -> torch.Tensor:
    """Combine powers of norms: sums for a finite p, maxima for the infinity norm."""
    is_max = math.isinf(norm_type)
    operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    parts: list[torch.Tensor] = []
    for part in gradients:
        if not part.is_counted:
            continue
        power = _local_power(part, norm_type)
        for group in part.shard_groups:
            dist.all_reduce(power, op=operation, group=group)
        parts.append(power)
    device = torch.device("cpu" if pp_mesh is None else pp_mesh.device_type)
    stacked = torch.stack(parts) if parts else torch.zeros(1, device=device)
    total = stacked.amax() if is_max else stacked.sum()
    if pp_mesh is not None:
        # Stages may differ in dtype, or have nothing to train.
        total = total.to(accumulator_dtype(total.device))
        dist.all_reduce(total, op=operation, group=pp_mesh.get_group())
    return total if is_max else total.pow(1.0 / norm_type)


def _local_power(part: LocalGradients, norm_type: float) -> torch.Tensor:
    """Return the sum of ``|x| ** p``, or the maximum of ``|x|``, over all elements on this rank."""
    filled = [tensor for tensor in part.tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=part.device, dtype=part.dtype)
    norms = torch.stack(list(torch._foreach_norm(filled, norm_type, dtype=part.dtype)))
    if math.isinf(norm_type):
        # A maximum over ranks may lose a NaN.
        return norms.amax().nan_to_num(nan=math.inf, posinf=math.inf)
    return norms.pow(norm_type).sum()
