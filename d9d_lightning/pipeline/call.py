"""Stand in for the pipelined submodule while a step of the user's runs: keep what it is called with, or answer the call.

[Note: one call]
A step such as ``training_step`` calls the pipelined submodule once. To begin with, the step runs up to this call on every
rank of the pipeline: what the submodule is called with enters the first stage, and its further arguments reach all of
them. The exception that ends the step there is no `Exception`, so that code which handles errors does not catch it. On
the last stage the step runs again from its beginning, and this time the call returns what the stages have made of it.
So code before the call runs on all ranks, and twice on the last; code after it runs once, on the last.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import nn

from d9d.core.pytree import tree_leaves, tree_map
from d9d.core.types import PyTree

__all__ = ["CapturedCall", "PipelineCall", "own_containers", "unchanged_batch"]


# `Any` in this module: the user's own arguments and results.
@dataclasses.dataclass(slots=True)
class CapturedCall:
    """What the pipelined submodule is called with for a microbatch."""

    args: tuple[Any, ...]
    """Positional arguments. The first one goes through the stages."""
    kwargs: dict[str, Any]
    """Keyword arguments."""

    def forget_values(self) -> None:
        """Keep shapes and types of the first argument, but not its memory: a rank without the first stage needs no more."""
        self.args = (tree_map(_without_memory, self.args[0]), *self.args[1:]) if self.args else self.args


class _CallReached(BaseException):  # no error, see [Note: one call]
    """Ends a step at the call of the pipelined submodule."""


class PipelineCall:
    """Takes the place of a submodule's forward pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """Replace the forward pass; hooks of the submodule stay.

        Args:
            name: Name of the submodule in the LightningModule, for messages.
            module: The submodule.
        """
        self._name = name
        self._module = module
        self._answer: Callable[[CapturedCall], Any] | None = None
        vars(module)["forward"] = self._forward

    def release(self) -> None:
        """Give the submodule its own forward pass back."""
        vars(self._module).pop("forward", None)

    def capture(self, step_name: str, step: Callable[[], object], *, needs_grad: bool) -> CapturedCall:
        """Run a step up to the call.

        Args:
            step_name: Name of the step, for messages.
            step: Runs it.
            needs_grad: Refuse a call where gradients are switched off. They must be on around this one.

        Raises:
            RuntimeError: If the step does not call the submodule, or calls it without gradients though they are needed.
        """
        calls: list[CapturedCall] = []
        has_grad: list[bool] = []

        def keep(call: CapturedCall) -> Any:  # noqa: ANN401
            calls.append(call)
            has_grad.append(torch.is_grad_enabled())
            raise _CallReached

        with contextlib.suppress(_CallReached), self._answering(keep):
            step()
        if not calls:
            raise RuntimeError(
                f"{step_name} does not call self.{self._name}, which is cut into pipeline stages: it must do so exactly "
                f"once. Name the submodule that it calls as pipeline_module, or set pipeline_parallel to 1."
            )
        if needs_grad and not has_grad[0]:
            raise RuntimeError(
                f"{step_name} calls self.{self._name} under no_grad or inference_mode, so that its stages can not be "
                f"trained. Call it with gradients, or detach the result behind the call."
            )
        return calls[0]

    def inject(self, step_name: str, step: Callable[[], PyTree[Any]], output: PyTree[Any]) -> PyTree[Any]:
        """Run a whole step whose call returns the output of the last stage, and return its result.

        Raises:
            RuntimeError: If the step calls the submodule not once.
        """
        calls: list[CapturedCall] = []

        def answer(call: CapturedCall) -> Any:  # noqa: ANN401
            calls.append(call)
            if len(calls) > 1:
                raise RuntimeError(
                    f"{step_name} calls self.{self._name} a second time. Stages run once for each microbatch: put both "
                    f"inputs into one call (along the batch dimension), or set pipeline_parallel to 1."
                )
            return output

        with self._answering(answer):
            result = step()
        if not calls:
            raise RuntimeError(
                f"{step_name} called self.{self._name} when it ran on the first stage, but not on the last one. Let it "
                f"not depend on the rank or on random numbers whether the submodule is called."
            )
        return result

    @contextlib.contextmanager
    def _answering(self, answer: Callable[[CapturedCall], Any]) -> Generator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self._answer is None:
            raise RuntimeError(
                f"self.{self._name} is cut into pipeline stages and can be called within training_step, "
                f"validation_step, test_step and predict_step only: no rank has all of its layers."
            )
        return self._answer(CapturedCall(args, kwargs))


def _without_memory(leaf: Any) -> Any:  # noqa: ANN401
    return leaf.new_empty(()).expand(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def unchanged_batch(step_name: str, batch: PyTree[Any]) -> Generator[PyTree[Any]]:
    """Give a run of a step a batch of its own containers, and refuse changes of the tensors in it.

    The step runs twice on the same batch, see [Note: one call]: what it takes out of a dictionary must be there again,
    and what it adds to a tensor in place would be added twice.

    Raises:
        RuntimeError: If a tensor was changed in place.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in tensors]  # pyright: ignore[reportPrivateUsage]  # no public name
    yield own_containers(batch)
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:  # pyright: ignore[reportPrivateUsage]
            raise RuntimeError(
                f"{step_name} changes a tensor of its batch in place (shape {tuple(tensor.shape)}, {tensor.dtype}). "
                f"With pipeline_parallel > 1 a step runs more than once on a batch: write x = x + 1 for x += 1."
            )


def own_containers(batch: PyTree[Any]) -> PyTree[Any]:
    """Return a batch with the same tensors in new containers."""
    return tree_map(_own_object, batch)


def _own_object(leaf: Any) -> Any:  # noqa: ANN401
    # Mappings of other classes, such as those of tokenizers, and objects with attributes are no nodes of a tree.
    if isinstance(leaf, Mapping):
        return copy.copy(leaf)
    has_attributes = hasattr(leaf, "__dict__")  # introspection: batches may be objects of any class
    return copy.copy(leaf) if has_attributes and not isinstance(leaf, torch.Tensor | nn.Module | type) else leaf
