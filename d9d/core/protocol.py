"""What the engine needs from data loaders, pack streams, optimizers, learning rate schedules and modules."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.types import MicrobatchPack, PyTree

# State dicts hold whatever their owner saves, hence Any.


@runtime_checkable
class DataLoaderProtocol(Protocol):
    """Yields collated microbatches and can be resumed. It may also have a length, in microbatches."""

    def __iter__(self) -> Iterator[PyTree[Any]]:
        """Start or continue the pass over the data."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        ...


@runtime_checkable
class MicrobatchPackStream(Protocol):
    """Yields the microbatches of one optimizer step at a time and can be resumed."""

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        """Start or continue the pass over the data."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Number of packs from the very start to the end of the data; None when it is not known."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        ...


@runtime_checkable
class OptimizerProtocol(Protocol):
    """What the training step asks of an optimizer."""

    def step(self) -> None:
        """Update the parameters from their gradients."""
        ...

    def zero_grad(self) -> None:
        """Drop or clear the gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        ...


@runtime_checkable
class LRSchedulerProtocol(Protocol):
    """What the training step asks of a learning rate schedule."""

    def step(self) -> None:
        """Set the learning rates of the next optimizer step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position that `state_dict` returned."""
        ...


@runtime_checkable
class MixesTokens(Protocol):
    """A module whose result for a token depends on others of the sequence: it has to know of ranks that hold parts of one."""

    @property
    def context_parallel_degree(self) -> int | None:
        """Over how many ranks the sequences that it sees are cut; None if it needs no others, as a router without losses."""
        ...


@runtime_checkable
class HandsOnTokens(Protocol):
    """A module that says what it hands on to other pipeline stages, and so has to know of ranks with parts of the tokens."""

    def use_token_parts(self, num_parts: int) -> None:
        """Take note that sequence parallelism cuts what is handed on.

        Args:
            num_parts: Number of tensor-parallel ranks that a sequence is cut over between blocks.
        """
        ...


@runtime_checkable
class ChecksMesh(Protocol):
    """A part of a job, such as a data provider, that can tell early whether it fits a mesh."""

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        """Return what does not fit, each with its numbers and a way to mend it. Not collective."""
        ...
