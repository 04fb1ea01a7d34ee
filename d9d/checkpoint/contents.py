"""What a checkpoint holds, before it is decided what of it to load and where to."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from d9d.checkpoint.documents import Document, document_key, filled, with_room
from d9d.checkpoint.load import read_flat

__all__ = ["CheckpointContents"]


@final
class CheckpointContents:
    """The names below a key of a checkpoint. Not collective: each rank reads on its own what it asks for.

    Args:
        path: Folder of the checkpoint.
        metadata: As `read_metadata` returns it.
        below: Key that names are relative to.
    """

    def __init__(self, path: Path, metadata: Metadata, below: str) -> None:
        self.path = path
        self.metadata = metadata
        self._prefix = f"{below}."
        self.names: tuple[str, ...] = tuple(
            name.removeprefix(self._prefix) for name in metadata.state_dict_metadata if name.startswith(self._prefix)
        )
        """Names of tensors and values."""

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor or value of a name."""
        return f"{self._prefix}{name}" in self.metadata.state_dict_metadata

    def entry(self, name: str) -> TensorStorageMetadata | None:
        """Return shape and dtype of a tensor; None if there is none of that name."""
        entry = self.metadata.state_dict_metadata.get(self._prefix + name)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    # Any: documents hold what their owners choose.
    def documents(self, below: str) -> dict[str, Any]:
        """Read all documents below a key, by the rest of their name."""
        keys = {key: None for name in self.names if name.startswith(f"{below}.") and (key := document_key(name))}
        state: dict[str, Any] = {self._prefix + key: Document(None) for key in keys}
        room = with_room(state, self.metadata)
        read = filled(state, read_flat(self.path, room, self.metadata))
        prefix = f"{self._prefix}{below}."
        return {key.removeprefix(prefix): value for key, value in read.items()}

    def tensors(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Read whole tensors to the host."""
        room: dict[str, torch.Tensor] = {}
        for name in names:
            entry = self.entry(name)
            if entry is None:
                raise ValueError(f"{self.path} has no tensor {name}")
            room[self._prefix + name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return list(read_flat(self.path, dict(room), self.metadata).values())
