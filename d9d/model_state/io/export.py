"""An export in progress: each rank writes shards of its own, and together they become a model state, or nothing does.

[Note: a rank that cannot write]
Gathering sharded tensors takes all ranks. So one whose disk is full goes on taking part, without writing, until the ranks
have agreed to stop: an error that ended its loop would leave the others waiting for it.
"""

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Protocol, final

import torch

from d9d.core.directory_lock import DirectoryLock
from d9d.core.participants import Participants
from d9d.model_state.io.export_directory import WrittenShard, prepare_directory, publish
from d9d.model_state.io.stored_values import check_writable_dtype
from d9d.model_state.mapper.names import listed

__all__ = ["Export", "ExportFiles", "ExportOptions"]

_GB = 10**9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How tensors are stored.

    Attributes:
        shard_size_gb: Most tensor bytes in a file, in units of 10^9; a tensor that is larger gets a file for itself.
        dtype: What floating-point tensors are stored as; None: each as it is. Others are not converted.
        manifest: Whether to write SHA-256 digests of the files beside them.
    """

    shard_size_gb: float = 4.0
    dtype: torch.dtype | None = None
    manifest: bool = False

    @property
    def shard_bytes(self) -> int:
        """Most tensor bytes in a file."""
        return max(1, round(self.shard_size_gb * _GB))

    def check(self) -> None:
        """Raise ValueError if an option makes no sense."""
        if not 0 < self.shard_size_gb < math.inf:
            raise ValueError(f"shard_size_gb is {self.shard_size_gb}; it must be a positive number, such as 4.0.")
        if self.dtype is not None:
            if not self.dtype.is_floating_point:
                raise ValueError(
                    f"dtype is {self.dtype}; only floating-point tensors are converted. Use torch.bfloat16, "
                    f"torch.float32, ..., or None to store each tensor as it is."
                )
            check_writable_dtype(self.dtype, "the option dtype")
            if torch.finfo(self.dtype).min > 0:
                raise ValueError(
                    f"dtype is {self.dtype}, which has no negative numbers, so weights cannot be stored as it."
                )


class ExportFiles(Protocol):
    """What a rank writes."""

    def flush(self) -> None:
        """Wait until it is on disk. May raise."""
        ...

    def complete(self) -> list[WrittenShard]:
        """Return the files that this rank reports, each of which one rank does. After all ranks have flushed. May raise."""
        ...

    def abort(self) -> None:
        """Give up: close and remove the files, as far as they are. At any time; raises nothing."""
        ...


@final
class Export:
    """One rank's part of an export. All participants create it, `begin`, write what is theirs, and call `finish`, or `abort`.

    Until then, no other export can write to the directory.

    Args:
        directory: Where the model state goes. Older weights there are replaced when the new ones are complete.
        participants: Ranks that export together.
        options: The same on all ranks.

    Raises:
        ValueError: An option makes no sense; on all ranks.
        OSError: The directory cannot be used, or another export into it is in progress; on all ranks.
    """

    def __init__(self, directory: Path, participants: Participants, options: ExportOptions) -> None:
        self._directory = directory
        self._participants = participants
        self._files: ExportFiles | None = None
        self._error: Exception | None = None
        self._lock: DirectoryLock | None = None
        try:
            with participants.failing_together():
                options.check()
                if participants.rank == 0:
                    self._lock = prepare_directory(directory)
            # Of the first rank.
            self._token = participants.gather(secrets.token_hex(8))[0]
        except BaseException:
            self._unlock()
            raise

    @property
    def token(self) -> str:
        """Hexadecimal digits that no other export has, the same on all ranks."""
        return self._token

    @property
    def has_failed(self) -> bool:
        """Whether this rank has met an error, which `finish` will raise."""
        return self._error is not None

    def begin(self, files: ExportFiles) -> None:
        """Take the files that this rank writes."""
        self._files = files

    @contextlib.contextmanager
    def noting_errors(self) -> Generator[None]:
        """Note an error of the block for `finish`, and go on; the first one counts. See [Note: a rank that cannot write]."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # raised by `finish`, on all ranks
            if self._error is None:
                self._error = error

    def finish(self) -> None:
        """Make a model state of what all ranks have written. A collective; blocks the host.

        Raises:
            OSError: A rank could not write; on all ranks, naming the path.
            ValueError: A tensor cannot be written, or two ranks have written one; on all ranks.
            RuntimeError: Anything else that went wrong on a rank; on all ranks.
        """
        written: list[WrittenShard] = []
        try:
            with self._participants.failing_together():
                if self._error is not None:
                    raise self._error
                if self._files is not None:
                    self._files.flush()
            with self._participants.failing_together():
                if self._files is not None:
                    written = self._files.complete()
            by_rank = self._participants.gather(written)
            _check_unique(by_rank)
            with self._participants.failing_together():
                if self._participants.rank == 0:
                    shards = [shard for shards in by_rank for shard in shards]
                    publish(self._directory, sorted(shards, key=lambda shard: shard.position))
                # Before any rank goes on, to export into the directory again.
                self._unlock()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up on this rank: remove what it has written. No communication, so the others are not told."""
        if self._files is not None:
            self._files.abort()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _check_unique(by_rank: list[list[WrittenShard]]) -> None:
    """Compare what the ranks have written; all of them see the same."""
    owners: dict[str, int] = {}
    twice: set[str] = set()
    ranks: set[int] = set()
    for rank, shards in enumerate(by_rank):
        for name in (name for shard in shards for name in shard.tensors):
            if owners.setdefault(name, rank) != rank:
                twice.add(name)
                ranks |= {owners[name], rank}
    if twice:
        raise ValueError(
            f"{len(twice)} tensors were written by more than one of the ranks {', '.join(map(str, sorted(ranks)))}: "
            f"{listed(twice)}. Each must come from one: give every rank a mapper of its own names, such as its part by "
            f"ModelStateMapperShard."
        )
    if not owners:
        raise ValueError("the mapper produces no tensors: there is nothing to export.")
