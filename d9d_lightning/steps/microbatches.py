"""Cut one batch of a loader into microbatches, and put what steps return for them together again."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from d9d.core.types import PyTree

__all__ = ["merge_outputs", "split_batch"]

_SPLIT_YOURSELF = "Give the LightningModule a method split_batch(batch, num_microbatches) that returns the parts."


# `Any` in this module: batches and outputs are the user's own types.
def split_batch(
    batch: PyTree[Any], num_microbatches: int, module: object
) -> tuple[Sequence[PyTree[Any]], Sequence[float]]:
    """Cut a batch into microbatches of about equal size, the larger ones first.

    Tensors are cut along their first dimension, which must be the same for all, and so are lists of other things that are
    as long. Numbers, strings, None and tensors without dimensions go to every microbatch. No copies: parts are views.

    Args:
        batch: Tensors in tuples, lists, mappings and dataclasses.
        num_microbatches: How many, at most: a batch of fewer samples has one microbatch for each.
        module: If it has a method ``split_batch(batch, num_microbatches)``, this returns the parts, in order.

    Returns:
        The microbatches, and which part of the batch's samples is in each; these add up to 1.

    Raises:
        ValueError: If the batch has no tensor to tell its size, or tensors of different sizes.
        TypeError: If something in it can not be cut.
    """
    # A protocol that is checked at runtime takes as long as all of the rest.
    split = getattr(module, "split_batch", None)  # introspection: a module may have it
    if split is not None:
        parts = list(split(batch, num_microbatches))
        if not 1 <= len(parts) <= num_microbatches:
            raise ValueError(f"split_batch() returned {len(parts)} parts: it must return 1 to {num_microbatches}.")
        sizes = [_num_samples(part) or 1 for part in parts]
        return parts, [size / sum(sizes) for size in sizes]
    if num_microbatches == 1:
        return (batch,), (1.0,)
    num_samples = _num_samples(batch)
    if num_samples is None:
        raise ValueError(
            f"a batch of type {type(batch).__name__} holds no tensor with a dimension to cut into {num_microbatches} "
            f"microbatches. {_SPLIT_YOURSELF}"
        )
    cut = _Cut.of(num_samples, max(1, min(num_microbatches, num_samples)))
    return _split(batch, cut, "batch"), cut.weights


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """Where a number of samples is cut."""

    num_samples: int
    sizes: list[int]
    weights: list[float]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(num_samples: int, num_parts: int) -> "_Cut":
        """Make the parts about equally large. Most batches have the same number of samples, so it is kept."""
        base, num_larger = divmod(num_samples, num_parts)
        sizes = [base + (index < num_larger) for index in range(num_parts)]
        return _Cut(num_samples, sizes, [size / num_samples if num_samples else 1.0 for size in sizes])

    def slices(self) -> list[slice]:
        """Return the samples of each part."""
        stops = [0, *itertools.accumulate(self.sizes)]
        return [slice(start, stop) for start, stop in itertools.pairwise(stops)]


def _open(node: PyTree[Any]) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], PyTree[Any]]] | None:
    """Return the entries of a container by key, and what builds another one like it; None for anything else."""
    if isinstance(node, Mapping):
        # Subclasses such as transformers' BatchEncoding are built from a mapping.
        return dict(node), cast("Callable[[dict[Any, Any]], Any]", type(node))
    if isinstance(node, tuple) and hasattr(node, "_fields"):  # introspection: namedtuples have no base class
        return dict(enumerate(node)), lambda entries: type(node)(*entries.values())
    if isinstance(node, list | tuple):
        return dict(enumerate(node)), lambda entries: type(node)(entries.values())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        entries = {field.name: vars(node)[field.name] for field in dataclasses.fields(node) if field.init}
        return entries, lambda entries: dataclasses.replace(node, **entries)
    return None


def _num_samples(node: PyTree[Any]) -> int | None:
    """Return the first dimension of the first tensor that has one."""
    if isinstance(node, torch.Tensor):
        return len(node) if node.ndim else None
    opened = _open(node)
    sizes = map(_num_samples, () if opened is None else opened[0].values())
    return next((size for size in sizes if size is not None), None)


def _split(node: PyTree[Any], cut: _Cut, path: str) -> Sequence[PyTree[Any]]:
    if isinstance(node, torch.Tensor) and node.ndim:
        if len(node) != cut.num_samples:
            raise ValueError(
                f"{path} has {len(node)} entries along its first dimension, but another tensor of the batch has "
                f"{cut.num_samples}: it is not clear how to cut it into microbatches. {_SPLIT_YOURSELF}"
            )
        return node.unsafe_split_with_sizes(cut.sizes)
    if isinstance(node, list | tuple) and len(node) == cut.num_samples and _num_samples(node) is None:
        return [node[span] for span in cut.slices()]
    if (opened := _open(node)) is not None:
        entries, rebuild = opened
        columns = {key: _split(entry, cut, f"{path}[{key!r}]") for key, entry in entries.items()}
        return [rebuild({key: column[part] for key, column in columns.items()}) for part in range(len(cut.sizes))]
    if node is None or isinstance(node, torch.Tensor | str | bytes | int | float | complex):
        return [node] * len(cut.sizes)
    raise TypeError(f"{path} is a {type(node).__name__}, which can not be cut into microbatches. {_SPLIT_YOURSELF}")


def merge_outputs(
    outputs: Sequence[PyTree[Any]], weights: Sequence[float], path: str = "what the step returned"
) -> PyTree[Any]:
    """Put the outputs of a batch's microbatches together, as if the step had run once.

    Tensors are joined along their first dimension; those without dimensions become their weighted mean, and so do
    numbers that differ. Mappings, tuples and dataclasses are merged by their entries, and lists are joined.

    Args:
        outputs: In order of the microbatches, of equal structure.
        weights: Part of each microbatch in the batch.
        path: Where they are from, for errors.

    Raises:
        TypeError: If the structures differ, or something can not be merged.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if len(set(map(type, outputs))) > 1:
        names = ", ".join(sorted({type(output).__name__ for output in outputs}))
        raise TypeError(f"{path} has different types for the microbatches of one batch: {names}.")
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(list(outputs))
    if type(first) is torch.Tensor and first.is_floating_point():
        # Losses: as few kernels as can be. Distributed tensors do not mix with the weights here.
        values = torch.stack(list(outputs))
        return torch.dot(values, _on_device(tuple(weights), values.dtype, values.device))
    if isinstance(first, list):
        return [entry for output in outputs for entry in output]
    if (opened := _open(first)) is not None:
        return _merge_entries(outputs, weights, path, *opened)
    if isinstance(first, torch.Tensor | float) or (type(first) is int and any(output != first for output in outputs)):
        return sum(output * weight for output, weight in zip(outputs, weights, strict=True))
    if all(output is first or output == first for output in outputs):
        return first
    raise TypeError(
        f"{path} is another {type(first).__name__} for each microbatch of a batch, which can not be merged. Return "
        f"tensors, numbers, or lists with one entry per sample."
    )


@functools.lru_cache(maxsize=64)
def _on_device(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the weights as a tensor, which takes a copy to the device only once."""
    return torch.tensor(weights, dtype=dtype, device=device)


def _merge_entries(
    outputs: Sequence[PyTree[Any]],
    weights: Sequence[float],
    path: str,
    entries: dict[Any, Any],
    rebuild: Callable[[dict[Any, Any]], PyTree[Any]],
) -> PyTree[Any]:
    columns = [opened[0] for output in outputs if (opened := _open(output)) is not None]
    if any(column.keys() != entries.keys() for column in columns):
        raise TypeError(f"{path} has different entries for the microbatches of one batch, at first {list(entries)}.")
    return rebuild(
        {key: merge_outputs([column[key] for column in columns], weights, f"{path}[{key!r}]") for key in entries}
    )
