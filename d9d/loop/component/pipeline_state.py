"""What a task remembers of each microbatch while the pack runs."""

import contextlib
from collections.abc import Generator
from typing import Generic, TypeVar

import torch

from d9d.core.pytree import tree_leaves, tree_map_only

__all__ = ["PipelineStateHandler"]

TState = TypeVar("TState")


class PipelineStateHandler(Generic[TState]):
    """Keeps the state of each microbatch of a step, without keeping its graph.

    A task may put the model output into the state while it computes the loss, for its metrics. When the scope of a
    microbatch ends, tensors in the state are detached, so that activations are freed with the backward pass.
    """

    def __init__(self) -> None:
        self._states: dict[int, TState] = {}

    def store(self, microbatch_idx: int, state: TState) -> None:
        """Keep the state of a microbatch until `reset`, in place of one that a failed step left behind."""
        self._states[microbatch_idx] = state

    @contextlib.contextmanager
    def scope(self, microbatch_idx: int) -> Generator[TState]:
        """Lend the state of a microbatch, and detach its tensors when the block ends.

        Raises:
            RuntimeError: The microbatch has no state.
        """
        if microbatch_idx not in self._states:
            raise RuntimeError(f"microbatch {microbatch_idx} has no state: stored are {sorted(self._states)}.")
        state = self._states[microbatch_idx]
        try:
            yield state
        finally:
            self._states[microbatch_idx] = _without_graph(state)

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()


def _without_graph(state: TState) -> TState:
    has_graph = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(state))
    # Without a graph the task gets its own object back, and nothing is rebuilt.
    return tree_map_only(torch.Tensor, torch.Tensor.detach, state) if has_graph else state
