"""Parity: the same computation on one process and on a mesh, and how close the two must be."""

from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from d9d.optim import localize_optimizer

FP64_EXACT = 1e-12
"""Same sums in another order. A double has 2.2e-16 relative error a step: four digits are left for some hundred steps,
and a wrong scale, a lost microbatch or a float32 intermediate (1e-7) is far outside."""

FP32_CLOSE = 1e-6
"""For float32 where float64 cannot be had. A float has 6e-8 relative error a step: room for some sixteen, so use it on
few and small operations; longer float32 chains call for float64."""

BatchT = TypeVar("BatchT")


class ReferenceStep(NamedTuple):
    """A training step on one process.

    Attributes:
        losses: One per batch, detached.
        grads: By parameter name, summed over the batches, as the optimizer saw them.
        params: By parameter name, after the optimizer's step.
    """

    losses: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]


def reference_step(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    batches: Sequence[BatchT],
    loss_fn: Callable[[nn.Module, BatchT], torch.Tensor],
) -> ReferenceStep:
    """Accumulate the gradients of all batches and take one optimizer step, without any collective.

    Args:
        build_model: Seeds itself, so that the parallel side can build equal parameters.
        build_optimizer: Takes the parameters.
        batches: Microbatches of one step.
        loss_fn: Takes the model and a batch; returns a scalar that holds its share of the step's scale, as gradients
            are summed.
    """
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        losses.append(loss.detach())
    grads = named_full_gradients(model)
    optimizer.step()
    return ReferenceStep(losses, grads, named_full_parameters(model))


def sgd_step(module: nn.Module, lr: float = 0.1) -> None:
    """Take a step of SGD on the local shards, as both trainers do.

    For an operation on DTensors of a new shape, DTensor goes through all pairs of layouts: 0.5 s on a mesh of three axes.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    localize_optimizer(optimizer)
    optimizer.step()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor, or the tensor itself. For a DTensor all ranks of its mesh must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_full_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the whole parameters. All ranks of the parameters' meshes must call it."""
    return {name: full(parameter.detach()).clone() for name, parameter in module.named_parameters()}


def named_full_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the whole gradients; a parameter without a gradient is left out.

    All ranks of the parameters' meshes must call it, and must have gradients for the same parameters.
    """
    return {
        name: full(parameter.grad.detach()).clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_close_tree(actual: object, expected: object, *, atol: float, rtol: float) -> None:
    """Check that two trees (dicts, lists, tuples of tensors and plain values) are alike, and report all differences.

    Tensors must agree in shape, dtype and, within tolerance, values; numbers in value; other leaves by `==`. NaN equals
    nothing. All ranks of the meshes of DTensor leaves must call it, since it compares the whole tensors.

    Raises:
        AssertionError: With one entry per leaf that is missing, unexpected or differs.
    """
    actual_leaves, expected_leaves = _leaves_by_path(actual), _leaves_by_path(expected)
    problems = [f"{path}: missing" for path in expected_leaves if path not in actual_leaves]
    problems += [f"{path}: not expected" for path in actual_leaves if path not in expected_leaves]
    for path, expected_leaf in expected_leaves.items():
        if path in actual_leaves:
            problem = _compare_leaf(actual_leaves[path], expected_leaf, atol, rtol)
            problems += [f"{path}: {problem}"] if problem else []
    if problems:
        raise AssertionError(f"{len(problems)} of {len(expected_leaves)} leaves differ:\n" + "\n".join(problems))


def _leaves_by_path(tree: object) -> dict[str, object]:
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path) or "(root)": full(leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves}


def _compare_leaf(actual: object, expected: object, atol: float, rtol: float) -> str | None:
    comparable = (torch.Tensor, Number)
    if not (isinstance(actual, comparable) and isinstance(expected, comparable)):
        return None if actual == expected else f"is {actual!r}, expected {expected!r}"
    try:
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    except AssertionError as error:
        return str(error)
    return None
