"""The gradient norm of a step, and its limit."""

import torch

from d9d.core.dist_context import REGULAR_DOMAIN, DistributedContext
from d9d.internals.grad_norm import clip_local_gradients_
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.config import GradientClippingConfig


class GradientClipper:
    """Measures the norm over all gradients of the job, and scales them down to the limit."""

    def __init__(
        self, dist_context: DistributedContext, gradient_manager: GradientManager, config: GradientClippingConfig
    ) -> None:
        """Take the gradients that the manager holds."""
        self._gradient_manager = gradient_manager
        self._max_norm = config.max_norm
        has_stages = dist_context.mesh_params.has_pipeline_parallel
        self._pp_mesh = dist_context.mesh_for(REGULAR_DOMAIN)["pp"] if has_stages else None

    def clip(self) -> torch.Tensor:
        """Clip the gradients, which must be summed and scaled. All ranks must call it; the host does not wait.

        Returns:
            The norm before clipping, one value on the device.
        """
        return clip_local_gradients_(self._gradient_manager.local_gradients(), self._max_norm, 2.0, self._pp_mesh)
