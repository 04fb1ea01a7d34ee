"""The ranks that load or export together, and fail together."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeVar, final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.dist_ops import all_gather_object, gather_object
from d9d.core.os_errors import reason_of

__all__ = ["Participants"]

T = TypeVar("T")


class _Failure(NamedTuple):
    """What went wrong on a rank, as far as the others are concerned."""

    kind: str
    text: str
    number: int | None = None
    """Number of an error of the operating system."""
    path: str | None = None
    """What such an error is about."""


@final
class Participants:
    """Ranks of a process, a group, or a mesh, in row-major order. All of them must make the same calls.

    On a mesh they speak along one dimension after the other, so that no group of all of them is needed.

    Args:
        groups: One for each mesh dimension, outermost first; none for a process on its own.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups = [group for group in groups if group.size() > 1]
        self._rank = 0
        self._size = 1
        for group in self._groups:
            self._rank = self._rank * group.size() + group.rank()
            self._size *= group.size()

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, *, without: str | None = None) -> "Participants":
        """Return the ranks of a mesh, or those that differ from this one in no other than the remaining dimensions.

        Args:
            mesh: This rank is in it, and its dimensions have names.
            without: Name of the dimension to leave out.
        """
        names = mesh.mesh_dim_names or ()
        return cls([mesh.get_group(name) for name in names if name != without])

    @property
    def rank(self) -> int:
        """Position of this rank among them."""
        return self._rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._size

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. A collective; blocks the host.

        Values are pickled: plain ones, of trusted peers.
        """
        values = [value]
        for group in reversed(self._groups):
            values = [other for others in all_gather_object(values, group) for other in others]
        return values

    def gather_to_first(self, value: T) -> list[T] | None:
        """Return the values of all ranks, by rank, on the first one; None on the others. A collective; blocks the host.

        Values are pickled: plain ones, of trusted peers.
        """
        values: list[T] | None = [value]
        for group in reversed(self._groups):
            # Ranks that are not the first of their group have nothing to hand on, and take part with that.
            gathered = gather_object(values, group, 0)
            values = None if gathered is None else [other for others in gathered for other in others or []]
        return values if self._rank == 0 else None

    def scatter_from_first(self, values: Sequence[T] | None) -> T:
        """Return to each rank its value among those that the first one has. A collective; blocks the host.

        Args:
            values: One for each rank, by rank; on other ranks it is not looked at.
        """
        own = values if self._rank == 0 else None
        for group in self._groups:
            own = _scattered(own, group)
        assert own is not None  # each group has handed on a part
        return own[0]

    @contextlib.contextmanager
    def failing_together(self) -> Generator[None]:
        """Raise on all ranks what any of them raises in the block, as `raise_together`. A collective at its end."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # raised below, on all ranks
            failure = error
        self.raise_together(failure)

    def raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if any of them has an error. A collective; blocks the host.

        Args:
            error: What went wrong on this rank.

        Raises:
            FileNotFoundError, ValueError: If all errors are such ones; OSError: if one of them is one, with its number and
                path if all have the same; RuntimeError otherwise. It names the ranks. A process on its own raises its error
                as it is.
        """
        if self._size == 1:
            if error is not None:
                raise error
            return
        failures = self.gather(None if error is None else _failure(error))
        ranks_by_failure: dict[_Failure, list[int]] = {}
        for rank, failure in enumerate(failures):
            if failure is not None:
                ranks_by_failure.setdefault(failure, []).append(rank)
        if not ranks_by_failure:
            return
        named = {
            failure: f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._size}"
            for failure, ranks in ranks_by_failure.items()
        }
        raise _error_of(named) from error


def _scattered(values: Sequence[T] | None, group: dist.ProcessGroup) -> Sequence[T] | None:
    """Hand out equal runs of the values that the first rank of a group may have."""
    parts: list[Sequence[T] | None] = [None] * group.size()
    if values is not None:
        length = len(values) // group.size()
        parts = [values[index * length : (index + 1) * length] for index in range(group.size())]
    received: list[Sequence[T] | None] = [None]
    dist.scatter_object_list(received, parts, group=group, group_src=0)
    return received[0]


def _failure(error: Exception) -> _Failure:
    match error:
        case OSError():
            kind = "FileNotFoundError" if isinstance(error, FileNotFoundError) else "OSError"
            path = None if error.filename is None else str(error.filename)
            return _Failure(kind, reason_of(error), error.errno, path)
        case ValueError():
            return _Failure("ValueError", str(error))
        case _:
            return _Failure("RuntimeError", f"{type(error).__name__}: {error}")


def _error_of(named: Mapping[_Failure, str]) -> Exception:
    """Return an error for failures, each with the ranks that have it in words."""
    kinds = {failure.kind for failure in named}
    if len({(failure.number, failure.path) for failure in named}) == 1:
        number, path = next((failure.number, failure.path) for failure in named)
        text = "\n".join(f"{ranks}: {failure.text}" for failure, ranks in named.items())
    else:
        number, path = None, None
        text = "\n".join(f"{ranks}: {_whole_text(failure)}" for failure, ranks in named.items())
    if number is not None:
        return OSError(number, text, path)
    if kinds == {"FileNotFoundError"}:
        return FileNotFoundError(text)
    if kinds & {"OSError", "FileNotFoundError"}:
        return OSError(text)
    return ValueError(text) if kinds == {"ValueError"} else RuntimeError(text)


def _whole_text(failure: _Failure) -> str:
    if failure.number is None:
        return failure.text
    return str(OSError(failure.number, failure.text, failure.path))
