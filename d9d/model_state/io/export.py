"""An export in progress: each rank writes shards of its own, and together they become a model state, or nothing does.

[Note: a rank that cannot write]
Gathering sharded tensors takes all ranks. So one whose disk is full goes on taking part, without writing, until the ranks
have agreed to stop: an error that ended its loop would leave the others waiting for it.
"""

import dataclasses
import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import final

import torch

from d9d.core.participants import Participants
from d9d.model_state.io.export_directory import (
    WrittenShard,
    prepare_directory,
    publish,
    remove_shards,
    temporary_name,
)
from d9d.model_state.io.export_lock import DirectoryLock
from d9d.model_state.io.manifest import file_digest
from d9d.model_state.io.shard_file import (
    HEADER_FRAME_BYTES,
    ShardFile,
    check_plain,
    check_writable_dtype,
    converted,
    expected_entry_bytes,
    stored_bytes,
)
from d9d.model_state.mapper.names import NearestNames, listed

__all__ = ["Export", "ExportOptions"]

_GB = 10**9
_MIN_HEADER_LIMIT_BYTES = 2**20
_MAX_HEADER_LIMIT_BYTES = 64 * 2**20
"""Readers refuse headers of more than 100 MB."""


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


@final
class Export:
    """One rank's part of an export. All participants create it, write what is theirs, and call `finish`, or `abort`.

    Until then, no other export can write to the directory.

    Args:
        directory: Where the model state goes. Older weights there are replaced when the new ones are complete.
        participants: Ranks that export together.
        options: The same on all ranks.
        output_names: Tensors that this rank may write.
        in_background: Copy tensors to the host, and write them in a thread.

    Raises:
        ValueError: An option makes no sense; on all ranks.
        OSError: The directory cannot be used, or another export into it is in progress; on all ranks.
    """

    def __init__(
        self,
        directory: Path,
        participants: Participants,
        options: ExportOptions,
        output_names: Collection[str],
        *,
        in_background: bool = False,
    ) -> None:
        self._directory = directory
        self._participants = participants
        self._error: Exception | None = None
        self._lock: DirectoryLock | None = None
        try:
            with participants.failing_together():
                options.check()
                if participants.rank == 0:
                    self._lock = prepare_directory(directory)
            # Of the first rank.
            token = participants.gather(secrets.token_hex(8))[0]
        except BaseException:
            self._unlock()
            raise
        shards = _Shards(directory, participants.rank, token, options, output_names)
        self._shards = _BackgroundShards(shards, options.dtype) if in_background else shards

    @property
    def has_failed(self) -> bool:
        """Whether this rank has met an error, which `finish` will raise."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """Remember an error for `finish`; the first one counts. Nothing is written any more."""
        if self._error is None:
            self._error = error

    def write(self, outputs: Mapping[str, torch.Tensor], expected: Collection[str]) -> None:
        """Write the tensors of a group. Does not raise, see [Note: a rank that cannot write].

        Args:
            outputs: Tensors by name. They may be changed afterwards.
            expected: The names that the group has declared.
        """
        if self._error is not None:
            return
        try:
            _check_outputs(outputs, expected)
            for name in sorted(outputs):
                self._shards.add(name, outputs[name])
        except Exception as error:  # noqa: BLE001  # raised by `finish`, on all ranks
            self.fail(error)

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
                written = self._shards.close()
            by_rank = self._participants.gather(written)
            _check_unique(by_rank)
            with self._participants.failing_together():
                if self._participants.rank == 0:
                    publish(self._directory, [shard for shards in by_rank for shard in shards])
                # Before any rank goes on, to export into the directory again.
                self._unlock()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up on this rank: remove what it has written. No communication, so the others are not told."""
        self._shards.abort()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()


@final
class _Shards:
    """Files of this rank, of which one is being written."""

    def __init__(
        self, directory: Path, rank: int, token: str, options: ExportOptions, output_names: Iterable[str]
    ) -> None:
        self._directory = directory
        self._rank, self._token = rank, token
        self._options = options
        self._entry_bytes = sum(expected_entry_bytes(name) for name in output_names)
        self._names: set[str] = set()
        self._file: ShardFile | None = None
        self._sizes: dict[str, int] = {}
        self._written: list[WrittenShard] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._names:
            raise ValueError(f"the mapper produces {name} twice. Each name in a model state stands for one tensor.")
        dtype = self._options.dtype
        num_bytes = stored_bytes(tensor, dtype)
        if self._file is not None and not self._fits(self._file, name, tensor, num_bytes):
            self._close_file(self._file)
        file = self._file or self._open_file()
        file.add(name, tensor, dtype)
        self._sizes[name] = num_bytes
        self._names.add(name)
        self._entry_bytes -= expected_entry_bytes(name)

    def close(self) -> list[WrittenShard]:
        if self._file is not None:
            self._close_file(self._file)
        return self._written

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()
        remove_shards(self._directory, self._written)

    def _fits(self, file: ShardFile, name: str, tensor: torch.Tensor, num_bytes: int) -> bool:
        is_full = file.num_bytes > 0 and file.num_bytes + num_bytes > self._options.shard_bytes
        return not is_full and file.has_room_for(name, tensor, self._options.dtype)

    def _open_file(self) -> ShardFile:
        # Which of the remaining tensors the file will hold is not known. Room for all of them would be a waste in the
        # first of many small files, so it is limited; once it is used up, the next file begins.
        limit = min(max(_MIN_HEADER_LIMIT_BYTES, self._options.shard_bytes // 64), _MAX_HEADER_LIMIT_BYTES)
        name = temporary_name(self._rank, len(self._written), self._token)
        self._sizes = {}
        self._file = ShardFile(self._directory / name, min(self._entry_bytes, limit) + HEADER_FRAME_BYTES)
        return self._file

    def _close_file(self, file: ShardFile) -> None:
        file.close()
        digest = file_digest(file.path) if self._options.manifest else None
        self._written.append(
            WrittenShard(name=file.path.name, num_bytes=file.num_file_bytes, tensors=self._sizes, digest=digest)
        )
        self._file = None


@final
class _BackgroundShards:
    """Hands host copies to a thread, the only one that touches the files until `close` has waited for it."""

    def __init__(self, shards: _Shards, dtype: torch.dtype | None) -> None:
        self._shards = shards
        self._dtype = dtype
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="d9d-export")
        self._writes: list[Future[None]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        check_plain(name, tensor)
        # Converted where it is, so that less travels and waits.
        stored = converted(name, tensor.detach(), self._dtype)
        copied = stored.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._writes.append(self._thread.submit(self._shards.add, name, copied))

    def close(self) -> list[WrittenShard]:
        for write in self._writes:
            write.result()
        written = self._thread.submit(self._shards.close).result()
        self._thread.shutdown()
        return written

    def abort(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._shards.abort()


def _check_outputs(outputs: Mapping[str, torch.Tensor], expected: Collection[str]) -> None:
    missing = set(expected) - set(outputs)
    surplus = set(outputs) - set(expected)
    if missing or surplus:
        problems = [f"did not return {NearestNames(outputs.keys()).described(missing)}"] if missing else []
        problems += [f"returned {listed(surplus)}, which it has not declared"] if surplus else []
        raise ValueError(
            f"apply() of the mapper {' and '.join(problems)}, for the group that makes {listed(expected) or 'nothing'}. "
            f"It must return exactly the outputs of the group in state_dependency_groups()."
        )


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
