"""The experts of a layer, all in one tensor per projection. Axes as in `grouped_mm`."""

import torch
from torch import nn

from d9d.kernel.swiglu import silu_mul
from d9d.module.base import ModuleLateInit

from .grouped_mm import AnyGroupedMmBackendConfig, ExpertTokenGroups, GroupedMmParameters, build_grouped_mm_backend


class GroupedLinear(nn.Module, ModuleLateInit):
    """One linear layer per group, without bias.

    The weight is ``(n_groups, in_features, out_features)``: transposed against `nn.Linear`, so that rows multiply it as
    it lies in memory.

    Args:
        n_groups: E.
        in_features: I.
        out_features: O.
        device: Where the weight is.
        dtype: Element type of the weight.
        grouped_mm_backend: Implementation; by default see `build_grouped_mm_backend`.
    """

    def __init__(
        self,
        n_groups: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        grouped_mm_backend: AnyGroupedMmBackendConfig | None = None,
    ) -> None:
        super().__init__()
        self.n_groups = n_groups
        self.in_features = in_features
        self.out_features = out_features
        self._backend_config = grouped_mm_backend
        params = GroupedMmParameters(in_features=in_features, out_features=out_features)
        self._grouped_mm = build_grouped_mm_backend(params, grouped_mm_backend)
        self.weight = nn.Parameter(torch.empty(n_groups, in_features, out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def with_features(self, in_features: int, out_features: int) -> "GroupedLinear":
        """Return a new layer of other sizes, with as many groups, on the same device, in the same dtype."""
        return GroupedLinear(
            self.n_groups, in_features, out_features, self.weight.device, self.weight.dtype, self._backend_config
        )

    def forward(self, x: torch.Tensor, x_groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply the rows of each group with its weight: ``(S, I)`` to ``(S, O)``, in the dtype of the rows."""
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            # Autocast knows linear layers and plain products, but not grouped ones.
            x = x.to(torch.get_autocast_dtype(device_type))
        # Experts that ranks share stay out of FSDP, and of its mixed precision, which comes by the tokens alone.
        return self._grouped_mm(x, self.weight.to(x.dtype), x_groups)

    def reset_parameters(self) -> None:
        """Initialise each group as `nn.Linear` does: uniformly up to ``in_features ** -0.5``."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"n_groups={self.n_groups}, in_features={self.in_features}, out_features={self.out_features}"


class GroupedSwiGLU(nn.Module, ModuleLateInit):
    """One `SwiGLU` per expert, whose output is scaled by the router's probability.

    Args:
        hidden_dim: Size of inputs and outputs.
        intermediate_dim: Width between the projections.
        num_experts: E.
        grouped_mm_backend: Implementation; by default see `build_grouped_mm_backend`.
    """

    def __init__(
        self,
        hidden_dim: int,
        intermediate_dim: int,
        num_experts: int,
        grouped_mm_backend: AnyGroupedMmBackendConfig | None = None,
    ) -> None:
        super().__init__()

        def projection(in_features: int, out_features: int) -> GroupedLinear:
            return GroupedLinear(num_experts, in_features, out_features, grouped_mm_backend=grouped_mm_backend)

        self.gate_proj = projection(hidden_dim, intermediate_dim)
        self.up_proj = projection(hidden_dim, intermediate_dim)
        self.down_proj = projection(intermediate_dim, hidden_dim)

    def forward(
        self, permuted_x: torch.Tensor, permuted_probs: torch.Tensor, expert_groups: ExpertTokenGroups
    ) -> torch.Tensor:
        """Apply each expert to its slots.

        Shapes:
            ``(S, hidden_dim)`` and probabilities ``(S,)`` to ``(S, hidden_dim)``.

        Args:
            permuted_x: Tokens, in the order of experts.
            permuted_probs: Probability of each slot.
            expert_groups: How many slots each expert has.
        """
        gated = silu_mul(self.gate_proj(permuted_x, expert_groups), self.up_proj(permuted_x, expert_groups))
        # Before the last projection, which is linear: it is the narrower place.
        scaled = (gated * permuted_probs.unsqueeze(-1)).to(gated.dtype)
        return self.down_proj(scaled, expert_groups)

    def reset_parameters(self) -> None:
        """Initialise each projection as `GroupedLinear` does."""
        self.gate_proj.reset_parameters()
        self.up_proj.reset_parameters()
        self.down_proj.reset_parameters()
