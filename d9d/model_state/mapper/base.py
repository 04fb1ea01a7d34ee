"""The contract of a state mapper: which tensors it needs together, and what it makes of them."""

import abc
import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch

from d9d.model_state.mapper.pieces import TensorPieces

__all__ = ["ModelStateMapper", "StateGroup", "check_shapes", "operation_name", "ordered_groups", "runnable_groups"]


@dataclasses.dataclass(frozen=True, slots=True)
class StateGroup:
    """Tensors that must be present together to produce others."""

    inputs: frozenset[str]
    """Names of the tensors that the group reads."""
    outputs: frozenset[str]
    """Names of the tensors that the group produces."""

    @classmethod
    def of(cls, inputs: Iterable[str], outputs: Iterable[str]) -> "StateGroup":
        """Make a group of names in any order."""
        return cls(frozenset(inputs), frozenset(outputs))

    def __str__(self) -> str:
        inputs, outputs = (", ".join(sorted(names)) or "nothing" for names in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}"


def check_shapes(mapper: "ModelStateMapper", group: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that a mapper cannot translate, with their names, which torch's own errors do not have.

    Args:
        mapper: A mapper whose `trace` does what its `apply` does.
        group: Inputs of one of its groups.

    Raises:
        IndexError: If a tensor lacks a dimension.
        ValueError: If a tensor has a wrong shape.
    """
    mapper.trace({name: TensorPieces.whole(name, tensor.shape, tensor.dtype) for name, tensor in group.items()})


def operation_name(mapper: "ModelStateMapper") -> str:
    """Return what a mapper is called in messages."""
    return type(mapper).__name__.removeprefix("ModelStateMapper")


class ModelStateMapper(abc.ABC):
    """Translates the tensors of one layout into those of another, group by group.

    The two abstract methods are all that a mapper needs. With `trace`, ranks read only what their shards are made of;
    with `inverse`, the way back need not be written.
    """

    @abc.abstractmethod
    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return all groups, which share no inputs."""

    @abc.abstractmethod
    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate the tensors of one group.

        Args:
            group: All inputs of one of the groups, by name. Those of `optional_inputs` may be missing.

        Returns:
            All outputs of that group, by name. They may be inputs or views of them.
        """

    def optional_inputs(self) -> frozenset[str]:
        """Return the inputs that `apply` and `trace` can do without, if the source does not have them."""
        return frozenset()

    def trace(self, group: Mapping[str, TensorPieces]) -> dict[str, TensorPieces] | None:
        """Return what `apply` would make of a group, without data: of which pieces of the inputs each output consists.

        Args:
            group: As for `apply`; each value is one piece, or what an earlier mapper has made of some.

        Returns:
            All outputs of that group; None if they are more than copies of pieces, so that all inputs must be read.
        """
        return None

    def inverse(self) -> "ModelStateMapper":
        """Return the mapper that makes the inputs of this one from its outputs.

        Raises:
            NotImplementedError: If there is none, with the reason.
        """
        raise NotImplementedError(f"{type(self).__name__} has no inverse: write the mapper of the other direction.")

    def explain(self) -> str:
        """Return one line for each group, ``sources -> targets``; compositions show them as a tree."""
        name = operation_name(self)
        return "\n".join(f"{group}  ({name})" for group in ordered_groups(self.state_dependency_groups()))


def require_mapper(mapper: object) -> None:
    """Raise TypeError for what is no mapper, such as a function that returns one."""
    if not isinstance(mapper, ModelStateMapper):
        raise TypeError(
            f"a ModelStateMapper is needed, not {mapper!r}. Call a function that returns one; where the names stay as they "
            f"are, it is d9d.model_state.mapper.adapters.identity_mapper_from_module(model)."
        )


def ordered_groups(groups: Iterable[StateGroup]) -> list[StateGroup]:
    """Return groups in an order that depends on names only, and so is the same in every process."""
    # One name decides, as groups share no inputs.
    return sorted(groups, key=lambda group: min(group.inputs, default=""))


def runnable_groups(
    mapper: ModelStateMapper, available: Collection[str]
) -> tuple[list[StateGroup], dict[StateGroup, list[str]]]:
    """Sort the groups of a mapper into those that can be run on some tensors, and those that lack some.

    The one rule for all who read and write. A group without outputs is never run, so what it drops need not be there. A
    group with outputs needs all of its inputs but the optional ones, and at least one: of nothing, nothing can be made.

    Args:
        mapper: The mapper.
        available: Names of the tensors that there are; more than the mapper reads is fine.

    Returns:
        The groups to run, in an order that depends on names only, as `ordered_groups`. And for each group that cannot be
        run, in the same order, the names that it lacks, sorted: without optional ones, unless it has no others.
    """
    known, optional = frozenset(available), mapper.optional_inputs()
    runnable: list[StateGroup] = []
    lacking: dict[StateGroup, list[str]] = {}
    for group in ordered_groups(mapper.state_dependency_groups()):
        lacks = group.inputs - known - optional
        if not lacks and group.outputs and known.isdisjoint(group.inputs):
            lacks = group.inputs
        if lacks:
            lacking[group] = sorted(lacks)
        elif group.outputs:
            runnable.append(group)
    return runnable, lacking
