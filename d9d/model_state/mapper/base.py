"""The contract of a state mapper: which tensors it needs together, and what it makes of them."""

import abc
import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class StateGroup:
    """Tensors that must be present together to produce others."""

    inputs: frozenset[str]
    """Names of the tensors that the group reads."""
    outputs: frozenset[str]
    """Names of the tensors that the group produces."""


class ModelStateMapper(abc.ABC):
    """Translates the tensors of one layout into those of another, group by group."""

    @abc.abstractmethod
    def state_dependency_groups(self) -> frozenset[StateGroup]:
        """Return all groups, which share no inputs."""

    @abc.abstractmethod
    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Translate the tensors of one group.

        Args:
            group: All inputs of one of the groups, by name.

        Returns:
            All outputs of that group, by name.
        """
