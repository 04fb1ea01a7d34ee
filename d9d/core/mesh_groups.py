"""Process groups of a job, each set of ranks once, however many mesh dimensions refer to it."""

import dataclasses
from datetime import timedelta
from itertools import product

import torch.distributed as dist

try:
    # New in torch 2.14, whose stubs the pinned one does not have.
    from torch.distributed import set_timeout  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
except ImportError:  # no public way to change a timeout before
    from torch.distributed.distributed_c10d import (
        _set_pg_timeout as set_timeout,  # pyright: ignore[reportPrivateUsage]
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Ranks laid out row-major over named dimensions, seen from one of them."""

    shape: dict[str, int]
    """Degree of each dimension, outermost first. Their product is the number of ranks."""
    rank: int
    """The rank to look from."""

    def coordinate(self, name: str) -> int:
        """Return the index of the rank along a dimension."""
        inner = 1
        for other in reversed(self.shape):
            if other == name:
                break
            inner *= self.shape[other]
        return self.rank // inner % self.shape[name]

    def peers(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return, in ascending order, the ranks that differ from this one at most in the given dimensions."""
        choices = [range(degree) if name in names else (self.coordinate(name),) for name, degree in self.shape.items()]
        ranks: list[int] = []
        for coordinate in product(*choices):
            rank = 0
            for index, degree in zip(coordinate, self.shape.values(), strict=True):
                rank = rank * degree + index
            ranks.append(rank)
        return tuple(ranks)


class GroupPool:
    """Creates the process groups of this rank, and hands out the same one for the same ranks.

    Two mesh dimensions that join the same ranks share a group: each communicator costs memory and start-up time on an
    accelerator. The group of all ranks is the default one.
    """

    def __init__(self) -> None:
        """Start with the default group, which must exist."""
        world = dist.group.WORLD
        assert world is not None  # the caller has initialised it
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(dist.get_world_size())): world}
        self._separate: list[dist.ProcessGroup] = []
        self._skipped: set[tuple[int, ...]] = set()
        self._timeout: timedelta | None = None

    def group(self, ranks: tuple[int, ...], description: str) -> dist.ProcessGroup:
        """Return the group of the given ranks, this one among them, creating it on first use.

        All members of a new group must call this, in the same order relative to their other new groups, and after as
        many new groups, see `skip_group`. Only members take part, so that start-up does not grow with the number of
        ranks of the job.

        Args:
            ranks: Global ranks in ascending order.
            description: Shown by PyTorch's debugging tools.
        """
        if ranks not in self._groups:
            group = dist.new_group(
                list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=description
            )
            assert isinstance(group, dist.ProcessGroup)  # only non-members get a placeholder
            self._groups[ranks] = group
        return self._groups[ranks]

    def skip_group(self, ranks: tuple[int, ...]) -> None:
        """Keep up with ranks that get a group of which this one is no member, where not all ranks get one.

        Torch names such a group by its ranks and by the number of groups that a rank has (2.11 to 2.14,
        `_hash_ranks_to_str`): members with different numbers would wait for each other for ever. So this rank gets a
        group of its own instead.

        Args:
            ranks: Those that call `group` meanwhile.
        """
        if ranks not in self._skipped:
            self._skipped.add(ranks)
            dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="placeholder")

    def separate_group(self, ranks: tuple[int, ...], description: str) -> dist.ProcessGroup:
        """Create a further group of the given ranks, whose operations are ordered among themselves alone.

        The rules of `group` for members and order hold here too.
        """
        group = dist.new_group(
            list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=description
        )
        assert isinstance(group, dist.ProcessGroup)  # only non-members get a placeholder
        self._separate.append(group)
        return group

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups of this rank, the default one first."""
        return *self._groups.values(), *self._separate

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives that start from now on, on every group, and on those to come."""
        self._timeout = timeout
        for group in self.groups:
            set_timeout(timeout, group)
