"""Activation checkpointing: blocks keep their inputs only, and compute what they need of the rest again in the backward pass.

It is inside of a block: hooks on the block, such as those of FSDP, are called once, and not again.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import torch
from pydantic import ConfigDict, field_validator
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from d9d.core.config import Config

__all__ = ["PRODUCTS_AND_ATTENTION", "SelectiveCheckpointing", "checkpoint_blocks"]

PRODUCTS_AND_ATTENTION: Final = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
)
"""Operations whose cost grows faster than their results: matrix products, and torch's kernels of attention."""

_Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class SelectiveCheckpointing(Config):
    """Keeps the results of some operations, and computes all others again.

    With the default, what is left to compute again is cheap: norms, activations, rotations.
    """

    model_config = ConfigDict(frozen=True)

    saved_ops: tuple[str, ...] = PRODUCTS_AND_ATTENTION
    """Names of operations of `torch.ops`, all of whose overloads count: ``aten.mm``. Views must not be among them."""

    @field_validator("saved_ops")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            _operation(name)
        return names

    def operations(self) -> frozenset[OpOverloadPacket]:
        """Return the operations whose results are kept."""
        return frozenset(map(_operation, self.saved_ops))


def checkpoint_blocks(blocks: Iterable[nn.Module], selection: SelectiveCheckpointing | None = None) -> None:
    """Let blocks compute activations again for their backward passes, in place. Without gradients nothing changes.

    Gradients are those of before, bit for bit where operations give the same bits each time. Random numbers are drawn alike.
    Before `d9d.module.compilation.compile_blocks`, if both are used. Names of parameters stay.

    Args:
        blocks: Modules, such as the layers of a decoder; none of them inside of another one.
        selection: What is kept. By default the inputs of a block, and nothing in it.
    """
    contexts = None if selection is None else functools.partial(selective_contexts, _policy(selection.operations()))
    for block in blocks:
        vars(block)["forward"] = _Checkpointed(block.forward, contexts)


class _Checkpointed:
    """The forward method of a block with checkpointing. Copies of a block get one of their own."""

    def __init__(self, forward: Callable[..., Any], contexts: _Contexts | None) -> None:
        self._forward = forward
        self._options = {} if contexts is None else {"context_fn": contexts}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever the block takes and gives
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **self._options, **kwargs)


def _policy(kept: frozenset[OpOverloadPacket]) -> Callable[..., CheckpointPolicy]:
    # Any: arguments of any operation.
    def choose(
        ctx: SelectiveCheckpointContext,
        operation: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> CheckpointPolicy:
        is_kept = isinstance(operation, OpOverload) and operation.overloadpacket in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def _operation(name: str) -> OpOverloadPacket:
    namespace, _, own = name.partition(".")
    found: object = getattr(getattr(torch.ops, namespace), own, None) if own else None  # introspection: by its name
    if not isinstance(found, OpOverloadPacket):
        raise ValueError(f"torch.ops has no operation {name!r}. Give namespace and name without overload: 'aten.mm'.")
    return found
