"""Clipping and loss scaling over the mesh, put into whichever precision plugin Lightning has chosen."""
# torch._foreach_* and the steps of a gradient scaler have no public names
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.core.placement import local_tensor
from d9d.internals.grad_norm import ParametersForNorm, clip_local_gradients_, group_parameters_for_norm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormScope:
    """What the norm of a rank's gradients extends over, besides its shards."""

    pipeline: DeviceMesh | None = None
    """One-dimensional mesh of the pipeline of this rank, whose stages count together; None without one."""
    uncounted: AbstractSet[nn.Parameter] = frozenset()
    """Parameters of this rank that another rank of the pipeline counts: all but one of the copies of what is outside of
    the stages. They are scaled all the same. Equal for ranks that run the same stages."""


def no_pipeline() -> NormScope:
    """Return the scope of jobs without pipelines."""
    return NormScope()


_Grouped = tuple[ParametersForNorm, bool]
"""Parameters and whether they are counted."""


class MeshClipping:
    """Clips the gradients of an optimizer as if they were on one process.

    Torch's own functions refuse a mixture of plain and distributed gradients, and count on one mesh.
    """

    def __init__(
        self, publish_norm: Callable[[torch.Tensor], None], scope: Callable[[], NormScope] = no_pipeline
    ) -> None:
        """Prepare nothing yet.

        Args:
            publish_norm: Is told the norm before clipping, a scalar on the device.
            scope: Returns what norms extend over; asked once for each optimizer.
        """
        self._publish_norm = publish_norm
        self.last_norm: torch.Tensor | None = None
        """What was published last."""
        self._scope = scope
        self._known: dict[int, tuple[list[nn.Parameter], NormScope, list[_Grouped]]] = {}

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale gradients down to a norm over all ranks. All ranks must call it; the host waits for nothing."""
        self._publish(self._clip(optimizer, float(clip_val)))

    def measure(self, optimizer: Optimizer) -> torch.Tensor:
        """Publish and return the norm, and change nothing. All ranks must call it; the host waits for nothing."""
        return self._publish(self._clip(optimizer, None))

    def _publish(self, norm: torch.Tensor) -> torch.Tensor:
        self.last_norm = norm
        self._publish_norm(norm)
        return norm

    @torch.no_grad()
    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Limit each element to ``[-clip_val, clip_val]``. No communication."""
        gradients = [
            local_tensor(parameter.grad) for parameter in _parameters_of(optimizer) if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_clamp_min_(gradients, -float(clip_val))
            torch._foreach_clamp_max_(gradients, float(clip_val))

    def _clip(self, optimizer: Optimizer, max_norm: float | None) -> torch.Tensor:
        scope, groups = self._grouped(optimizer)
        gradients = [
            dataclasses.replace(group.local_gradients(), is_counted=is_counted)
            for parameters, is_counted in groups
            for group in parameters.groups
        ]
        return clip_local_gradients_(gradients, max_norm, norm_type=2.0, pp_mesh=scope.pipeline)

    def _grouped(self, optimizer: Optimizer) -> tuple[NormScope, list[_Grouped]]:
        parameters = _parameters_of(optimizer)
        key = id(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        known = self._known.get(key)
        # The list keeps the parameters alive, so that no other optimizer can be taken for this one.
        if known is None or len(known[0]) != len(parameters) or any(map(_differ, known[0], parameters)):
            scope = self._scope()
            counted = [parameter for parameter in parameters if parameter not in scope.uncounted]
            rest = [parameter for parameter in parameters if parameter in scope.uncounted]
            groups = [(group_parameters_for_norm(counted), True), (group_parameters_for_norm(rest), False)]
            known = self._known[key] = (parameters, scope, groups)
        return known[1], known[2]


def install_mesh_clipping(
    plugin: Precision,
    publish_norm: Callable[[torch.Tensor], None],
    scope: Callable[[], NormScope] = no_pipeline,
) -> MeshClipping:
    """Replace how a precision plugin clips, and nothing else of it.

    On the instance and not by a subclass: user plugins are of any class, and checkpoints store the state of a plugin
    under the name of its class.

    Args:
        plugin: What Lightning or the user has chosen.
        publish_norm: See `MeshClipping`.
        scope: See `MeshClipping`.
    """
    clipping = MeshClipping(publish_norm, scope)
    vars(plugin).update(clip_grad_by_norm=clipping.clip_by_norm, clip_grad_by_value=clipping.clip_by_value)
    return clipping


def clips_by_norm(module: LightningModule) -> bool:
    """Tell whether the Trainer of a module clips by norm before each update, and so knows the norm."""
    trainer = module.trainer
    return (
        bool(trainer.gradient_clip_val)
        and trainer.gradient_clip_algorithm in (None, "norm")
        and module.automatic_optimization
        and not is_overridden("configure_gradient_clipping", module)
    )


def agree_on_scale(plugin: Precision) -> None:
    """Let a loss scaler skip steps, and change its scale, on all ranks if any of them finds a value that is not finite.

    Also lets it unscale distributed gradients, of any mixture of layouts. One collective for each optimizer step; the
    host waits for nothing more than it did. A plugin without a scaler is left alone.
    """
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is not None and "_unscale_grads_" not in vars(scaler):
        vars(scaler)["_unscale_grads_"] = _AgreedUnscaling(scaler)


class _AgreedUnscaling:
    """Replaces the step of a scaler that unscales gradients and finds out whether they are finite."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def __call__(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if any(isinstance(parameter.grad, DTensor) for parameter in _parameters_of(optimizer)):
            found = _unscale_local(optimizer, inv_scale, found_inf, allow_fp16)
        else:
            plain = type(self._scaler)._unscale_grads_
            found = plain(self._scaler, optimizer, inv_scale, found_inf, allow_fp16)
        agreed = found_inf.clone()
        for value in found.values():
            agreed = torch.maximum(agreed, value.to(agreed.device))
        # Also by a rank that has no gradients: the others wait for it.
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return {device: agreed.to(device) for device in found or (agreed.device,)}


@torch.no_grad()
def _unscale_local(
    optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Do what a scaler does, on what this rank holds of the gradients.

    Torch's own communicates for each group of gradients, and takes all to be distributed alike.
    """
    gradients: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for parameter in _parameters_of(optimizer):
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            if gradient.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says it
            gradients[gradient.device, gradient.dtype].append(gradient)
    found: dict[torch.device, torch.Tensor] = {}
    for (device, _), members in gradients.items():
        found.setdefault(device, found_inf.to(device, copy=True))
        torch._amp_foreach_non_finite_check_and_unscale_(members, found[device], inv_scale.to(device))
    return found


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _differ(one: nn.Parameter, other: nn.Parameter) -> bool:
    return one is not other
