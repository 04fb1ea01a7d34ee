"""Files of one rank, into which tensors are written in the order in which they come."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

import torch

from d9d.model_state.io.export import ExportOptions
from d9d.model_state.io.export_directory import WrittenShard, remove_files, temporary_name
from d9d.model_state.io.manifest import file_digest
from d9d.model_state.io.shard_file import HEADER_FRAME_BYTES, ShardFile, expected_entry_bytes
from d9d.model_state.io.stored_values import stored_bytes

__all__ = ["StreamedFiles"]

_MIN_HEADER_LIMIT_BYTES = 2**20
_MAX_HEADER_LIMIT_BYTES = 64 * 2**20
"""Readers refuse headers of more than 100 MB."""


@final
class StreamedFiles:
    """Files of this rank, of which one is being written.

    Args:
        directory: Where they are.
        rank: Position of this rank among those that export together.
        token: Hexadecimal digits that no other export has.
        options: The same on all ranks.
        output_names: Tensors that this rank may write.
    """

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

    def write(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a group.

        Args:
            outputs: Tensors by name. They may be changed afterwards.

        Raises:
            ValueError: The mapper has made what cannot be stored, or a name again.
            OSError: Naming the path.
        """
        for name in sorted(outputs):
            self._add(name, outputs[name])

    def flush(self) -> None:
        """Close the last file. See `ExportFiles`."""
        if self._file is not None:
            self._close_file(self._file)

    def complete(self) -> list[WrittenShard]:
        """Return all files. See `ExportFiles`."""
        return self._written

    def abort(self) -> None:
        """Remove what there is. See `ExportFiles`."""
        if self._file is not None:
            self._file.abort()
        remove_files(self._directory / shard.name for shard in self._written)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
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
            WrittenShard(
                name=file.path.name,
                position=(self._rank, len(self._written)),
                num_bytes=file.num_file_bytes,
                tensors=self._sizes,
                digest=digest,
            )
        )
        self._file = None
