"""Linear layers with adapters.

Axes: I input features, O output features, R rank, S rows in groups (of experts).
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from pydantic import Field, PositiveInt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from d9d.core.config import Config
from d9d.core.placement import local_tensor
from d9d.kernel.precision import at_least_fp32
from d9d.module.base import ModuleLateInit
from d9d.module.block.moe import GroupedLinear
from d9d.module.block.moe.grouped_mm import ExpertTokenGroups
from d9d.module.parallelism.dropout_mask import drop_distributed
from d9d.module.parallelism.tensor import parallelize_tensor

from .lora_layout import follow_layout, follow_split, hook_ids, move_hooks, own_weight

__all__ = ["LoRAGroupedLinear", "LoRALayer", "LoRALinear", "LoRAParameters", "adapt_layer"]


class LoRAParameters(Config):
    """Sizes of adapters."""

    r: PositiveInt
    """R, the width of an adapter."""
    alpha: PositiveInt
    """What adapters add is multiplied by ``alpha / r``."""
    dropout: float = Field(ge=0, lt=1)
    """Probability with which an adapter drops an input in training."""


class LoRALinear(nn.Module, ModuleLateInit):
    """A linear layer with an adapter: ``base(x) + lora_B(lora_A(dropout(x))) * alpha / r``.

    Tensor parallelism splits both, see [Note: adapters of split layers]. Then what all ranks have is dropped alike, and parts of
    it by masks of their own.

    Args:
        base_layer: The layer, which is not changed. The adapter has its device and dtype.
        params: Sizes of the adapter.
    """

    def __init__(self, base_layer: nn.Linear, params: LoRAParameters) -> None:
        super().__init__()
        like = {"device": base_layer.weight.device, "dtype": base_layer.weight.dtype}
        self.base = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, params.r, bias=False, **like)
        self.lora_B = nn.Linear(params.r, base_layer.out_features, bias=False, **like)
        self.dropout = nn.Dropout(params.dropout)
        self.scale = params.alpha / params.r
        _reset_adapter(self)

    @property
    def in_features(self) -> int:
        """I."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer and its adapter: ``(..., I)`` to ``(..., O)``."""
        is_dropped = self.dropout.training and self.dropout.p > 0
        dropped = drop_distributed(x, self.dropout.p) if is_dropped and isinstance(x, DTensor) else self.dropout(x)
        return self.base(x) + self.lora_B(self.lora_A(dropped)) * self.scale

    def split_over_ranks(self, style: ParallelStyle, mesh: DeviceMesh) -> None:
        """Split the layer as `parallelize_tensor` does, and the adapter with it."""
        before = hook_ids(self.base)
        parallelize_tensor(self.base, style, mesh)
        # Values are the same on all ranks, as those of the layer.
        follow_split(self.base, (self.lora_A, self.lora_B), src_data_rank=None)
        move_hooks(self.base, self, but=before)

    def split_dims(self, dim: int) -> Mapping[str, int | None]:
        """Return along which dimension each parameter is split where the weight of the layer is along `dim`."""
        by_outputs = 0 if dim == 0 else None
        return {
            "base.weight": dim,
            "base.bias": by_outputs,
            "lora_A.weight": 1 if dim == 1 else None,
            "lora_B.weight": by_outputs,
        }

    def merge_with_base_(self) -> nn.Linear:
        """Add the adapter to the weight of the layer, in place, and return the layer.

        If weights are distributed, all ranks of their meshes must call it. Sums are in fp32 at least, and rounded once.
        """
        _add_product_(self.base, self.lora_B, self.lora_A, self.scale)
        move_hooks(self, self.base)
        return self.base

    def reset_parameters(self) -> None:
        """Initialise the layer as it says, the first factor as an `nn.Linear`, and the second to zero."""
        self.base.reset_parameters()
        _reset_adapter(self)


class LoRAGroupedLinear(nn.Module, ModuleLateInit):
    """A `GroupedLinear` with an adapter for each group, as experts have them. Adapters are where their experts are.

    Args:
        base_layer: The layer, which is not changed. The adapters have its device, dtype and backend.
        params: Sizes of each adapter.
    """

    def __init__(self, base_layer: GroupedLinear, params: LoRAParameters) -> None:
        super().__init__()
        self.base = base_layer
        self.lora_A = base_layer.with_features(base_layer.in_features, params.r)
        self.lora_B = base_layer.with_features(params.r, base_layer.out_features)
        self.dropout = nn.Dropout(params.dropout)
        self.scale = params.alpha / params.r
        _reset_adapter(self)

    def forward(self, x: torch.Tensor, x_groups: ExpertTokenGroups) -> torch.Tensor:
        """Apply the layer and its adapters to the rows of each group: ``(S, I)`` to ``(S, O)``."""
        narrow = self.lora_A(self.dropout(x), x_groups)
        return self.base(x, x_groups) + self.lora_B(narrow, x_groups) * self.scale

    def merge_with_base_(self) -> GroupedLinear:
        """Add the adapters to the weight of the layer, in place, and return the layer.

        If weights are distributed, all ranks of their meshes must call it. Sums are in fp32 at least, and rounded once.
        """
        _add_product_(self.base, self.lora_A, self.lora_B, self.scale)
        return self.base

    def reset_parameters(self) -> None:
        """Initialise the layer as it says, the first factors alike, and the second ones to zero."""
        self.base.reset_parameters()
        _reset_adapter(self)


LoRALayer: TypeAlias = LoRALinear | LoRAGroupedLinear
"""A layer with an adapter."""


def adapt_layer(base: nn.Linear | GroupedLinear, params: LoRAParameters, *, is_sharded: bool) -> LoRALayer:
    """Build a layer with an adapter, which is distributed as the layer is.

    Args:
        base: The layer. If it is distributed, all ranks of its mesh must call this.
        params: Sizes of the adapter.
        is_sharded: Whether FSDP holds the weight of the layer.
    """
    if isinstance(base, GroupedLinear):
        layer = LoRAGroupedLinear(base, params)
        follow_layout(base, (layer.lora_A, layer.lora_B), is_sharded=is_sharded)
        return layer
    layer = LoRALinear(base, params)
    follow_layout(base, (layer.lora_A, layer.lora_B), is_sharded=is_sharded)
    if isinstance(own_weight(layer.lora_A), DTensor) and not is_sharded:
        move_hooks(base, layer)
    return layer


def _reset_adapter(layer: LoRALayer) -> None:
    layer.lora_A.reset_parameters()
    nn.init.zeros_(layer.lora_B.weight)


@torch.no_grad()
def _add_product_(base: nn.Module, first: nn.Module, second: nn.Module, scale: float) -> None:
    """Add ``first.weight @ second.weight * scale`` to the weight of a layer, whatever their layouts."""
    weight = own_weight(base)
    product = low_rank_product(own_weight(first), own_weight(second), scale)
    if isinstance(product, DTensor) and isinstance(weight, DTensor):
        product = product.redistribute(weight.device_mesh, weight.placements)
    local = local_tensor(weight)
    local.copy_(at_least_fp32(local) + local_tensor(product))


def low_rank_product(first: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``first @ second * scale``, computed in fp32 at least: what an adapter adds to a weight."""
    return at_least_fp32(first) @ at_least_fp32(second) * scale
