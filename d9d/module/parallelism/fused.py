"""Split linear layers that compute several things at once, such as queries, keys and values.

[Note: parts of fused layers]
A rank needs its part of each group, which are rows of one weight that do not follow each other. No placement of a DTensor says
so in a way that FSDP and checkpoints understand. So the layer is taken apart: each group becomes a layer of its own,
``parts.0`` and so on, split like any other, and the fused one joins what they give. The names of its parameters change with
it: a checkpoint of a mesh with tensor parallelism is not read without, and says which names are missing. First values do not
change: they are drawn for the whole layer, by its name and its own method, and each part takes its rows.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from d9d.core.placement import local_tensor, shard_of
from d9d.module.parallelism.tensor import SplitsItself, parallelize_tensor

__all__ = ["FusedColwiseParallel"]

_WORD = re.compile(r"colwise_fused\((\d+(?:, *\d+)*)\)")


class FusedColwiseParallel(ParallelStyle):
    """Splits each of several groups of output features of a linear layer, and leaves a rank its part of all of them.

    Behind the layer a rank sees the same groups side by side, each smaller: of queries, keys and values, those of its heads.
    See [Note: parts of fused layers]. Takes a plain tensor that is the same on all ranks, and gives a plain one. The gradient of
    its input is summed over the ranks once.

    Args:
        counts: How many heads each group has, in their order, such as ``(8, 2, 2)``; where there are no heads, how many
            features, such as the width of a gate and of what it gates. Heads stay whole.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self._counts = tuple(counts)

    @classmethod
    def parse(cls, word: object) -> "FusedColwiseParallel | None":
        """Read the word of a plan, such as ``colwise_fused(8, 2, 2)``; None for anything else."""
        match = _WORD.fullmatch(word) if isinstance(word, str) else None
        return None if match is None else cls([int(count) for count in match[1].split(",")])

    def check(self, module: nn.Module, degree: int) -> None:
        """Refuse a layer, or a number of ranks, that does not fit.

        Raises:
            NotImplementedError: If it is no linear layer, or one that computes something else.
            ValueError: If groups are no whole features, or are not shared evenly by the ranks, with the degrees that can.
        """
        if isinstance(module, SplitsItself):
            raise NotImplementedError(
                f"a {type(module).__name__} computes several things at once here, and can not be taken apart. Leave this layer "
                f"without adapter, or give each thing that it computes a layer, and an adapter, of its own."
            )
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"{type(self).__name__} is for nn.Linear, not for a {type(module).__name__}.")
        if type(module).forward is not nn.Linear.forward:
            raise NotImplementedError(
                f"a {type(module).__name__} has a forward method of its own, which its parts would not call. Use nn.Linear, or "
                f"a layer for each thing that is computed."
            )
        if not all(self._counts) or module.out_features % sum(self._counts):
            raise ValueError(
                f"{module.out_features} features can not be {sum(self._counts)} = {' + '.join(map(str, self._counts))} heads "
                "of equal size. Give the number of heads, or of features, of each group."
            )
        if any(count % degree for count in self._counts):
            valid = [
                str(ranks) for ranks in range(1, min(self._counts) + 1) if not any(n % ranks for n in self._counts)
            ]
            raise ValueError(
                f"groups of {', '.join(map(str, self._counts))} can not be shared evenly by tensor_parallel = {degree} ranks. Set "
                f"tensor_parallel to one of {', '.join(valid)}."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # What torch's `parallelize_module` calls.
        self.check(module, device_mesh.size())
        assert isinstance(module, nn.Linear)  # checked above
        parts = _parts_of(module, [count * module.out_features // sum(self._counts) for count in self._counts])
        del module.weight, module.bias
        # The module itself, since nobody knows where else it is held.
        module.__class__ = _fused_class(type(module))
        module.add_module("parts", parts)
        for part in parts:
            parallelize_tensor(part, ColwiseParallel(), device_mesh)

        def take_in(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # One tensor for all parts, so that their gradients are added before they are summed over the ranks.
            return DTensor.from_local(args[0], device_mesh, [Replicate()], run_check=False), *args[1:]

        module.register_forward_pre_hook(take_in)
        return module


class _FusedLinear(nn.Linear):
    """See [Note: parts of fused layers]."""

    parts: nn.ModuleList

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name of nn.Linear
        return torch.cat([part(input) for part in self.parts], dim=-1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the values of the whole layer, as its class does, and leave each part its rows of them."""
        parts = [part for part in self.parts if isinstance(part, _Part)]
        some = local_tensor(parts[0].weight)
        has_bias = "bias" in parts[0].state_dict()
        self.weight = nn.Parameter(some.new_empty(self.out_features, self.in_features))
        self.bias = nn.Parameter(some.new_empty(self.out_features)) if has_bias else None
        try:
            super().reset_parameters()
            whole = [self.weight, *([] if self.bias is None else [self.bias])]
            sizes = [part.out_features for part in parts]
            for part, *values in zip(parts, *(tensor.split(sizes) for tensor in whole), strict=True):
                for parameter, value in zip(part.parameters(), values, strict=True):
                    local_tensor(parameter).copy_(shard_of(value, parameter))
        finally:
            del self.weight, self.bias


@functools.cache
def _fused_class(base: type[nn.Linear]) -> type[_FusedLinear]:
    # One for all layers: compiled code asks for the class, and would be no other layer's.
    return type(f"Fused{base.__name__}", (_FusedLinear, base), {})


class _Part(nn.Linear):
    """See [Note: parts of fused layers]."""

    def reset_parameters(self) -> None:
        """Keep what the fused layer has drawn for it, also where each module is initialised by itself."""


@torch.no_grad()
def _parts_of(module: nn.Linear, sizes: Sequence[int]) -> nn.ModuleList:
    parts = nn.ModuleList()
    weights = module.weight.split(list(sizes))
    own_bias = dict(module.named_parameters(recurse=False)).get("bias")  # if it has one
    biases = [None] * len(sizes) if own_bias is None else own_bias.split(list(sizes))
    for weight, bias in zip(weights, biases, strict=True):
        part = _Part(module.in_features, len(weight), bias is not None, device="meta")
        part.weight = nn.Parameter(weight.clone(), requires_grad=module.weight.requires_grad)
        if bias is not None:
            part.bias = nn.Parameter(bias.clone(), requires_grad=module.bias.requires_grad)
        parts.append(part)
    return parts
