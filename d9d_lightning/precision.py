"""Clipping over the mesh, put into whichever precision plugin Lightning has chosen."""
# torch._foreach_* have no public names
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d.internals.grad_norm import ParametersForNorm, clip_grad_norm_distributed_, group_parameters_for_norm


class MeshClipping:
    """Clips the gradients of an optimizer as if they were on one process.

    Torch's own functions refuse a mixture of plain and distributed gradients, and count on one mesh.
    """

    def __init__(self, publish_norm: Callable[[torch.Tensor], None]) -> None:
        """Take what is told the norm before clipping, a scalar on the device."""
        self._publish_norm = publish_norm
        self._groups: dict[int, tuple[list[nn.Parameter], ParametersForNorm]] = {}

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale gradients down to a norm over all ranks. All ranks must call it; the host waits for nothing."""
        self._publish_norm(
            clip_grad_norm_distributed_(self._grouped(optimizer), float(clip_val), norm_type=2.0, pp_mesh=None)
        )

    @torch.no_grad()
    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Limit each element to ``[-clip_val, clip_val]``. No communication."""
        gradients = [
            local_tensor(parameter.grad) for parameter in _parameters_of(optimizer) if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_clamp_min_(gradients, -float(clip_val))
            torch._foreach_clamp_max_(gradients, float(clip_val))

    def _grouped(self, optimizer: Optimizer) -> ParametersForNorm:
        parameters = _parameters_of(optimizer)
        key = id(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        known = self._groups.get(key)
        # The list keeps the parameters alive, so that no other optimizer can be taken for this one.
        if known is None or len(known[0]) != len(parameters) or any(map(_differ, known[0], parameters)):
            known = (parameters, group_parameters_for_norm(parameters))
            self._groups[key] = known
        return known[1]


def install_mesh_clipping(
    plugin: Precision, params: DeviceMeshParameters, publish_norm: Callable[[torch.Tensor], None]
) -> None:
    """Replace how a precision plugin clips, and nothing else of it.

    On the instance and not by a subclass: user plugins are of any class, and checkpoints store the state of a plugin
    under the name of its class.

    Raises:
        NotImplementedError: For fp16 with a loss scaler on sharded parameters.
    """
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None and params.data_parallel_shard > 1:
        raise NotImplementedError(
            "precision='16-mixed' with data_parallel_shard > 1 comes with a later release: ranks would not agree on "
            "which steps to skip. Use 'bf16-mixed', or replicate."
        )
    clipping = MeshClipping(publish_norm)
    vars(plugin).update(clip_grad_by_norm=clipping.clip_by_norm, clip_grad_by_value=clipping.clip_by_value)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _differ(one: nn.Parameter, other: nn.Parameter) -> bool:
    return one is not other
