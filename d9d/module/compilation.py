"""Compile models block by block.

Blocks that are alike share their code if only inputs and parameters differ, and start-up does not grow with the number of
layers. What happens between blocks (gathering of shards, transfers of pipelines) stays outside.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn

__all__ = ["compile_blocks"]


# Any: these are torch's own arguments, passed through.
def compile_blocks(blocks: Iterable[nn.Module], **compile_options: Any) -> None:
    """Compile the forward method of each block, in place, at its first call.

    Hooks on a block itself are not compiled, so those of FSDP and of replicated parameters do not break the graph; those of
    layers inside it are, such as those of tensor parallelism. Before or after the model is distributed, and after
    `d9d.module.recompute.checkpoint_blocks`. Names of parameters stay. Copies of a block are compiled anew.

    Args:
        blocks: Modules, such as the layers of a decoder; none of them inside of another one.
        **compile_options: Keyword arguments of `torch.compile`, such as ``fullgraph``, ``dynamic`` and ``mode``.
    """
    for block in blocks:
        vars(block)["forward"] = _Compiled(block.forward, compile_options)


class _Compiled:
    """The compiled forward method of a block."""

    def __init__(self, forward: Callable[..., Any], options: dict[str, Any]) -> None:
        self._forward, self._options = forward, options
        self._compiled = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever the block takes and gives
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied function would still be bound to the first block.
        return type(self)(copy.deepcopy(self._forward, memo), self._options)
