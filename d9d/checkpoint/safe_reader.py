"""Reads a checkpoint in PyTorch's distributed format without running code from its files.

[Note: no code from files]
PyTorch pickles two things in a distributed checkpoint: what tensors there are (``.metadata``) and all values that are not
tensors. Unpickling runs whatever a file asks for. Here the first is read by an unpickler that knows the classes of such
metadata and nothing else, and the second is JSON (`d9d.checkpoint.planners`). Tensors are read by ``torch.load`` with
``weights_only``, which no environment variable can change.
"""

import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from d9d.checkpoint.record import is_plain_name

__all__ = ["METADATA_NAME", "SafeReader"]

METADATA_NAME = ".metadata"
"""File that tells which part of which tensor is where."""

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # PyTorch notes where it has written to
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
}
_ALLOWED_TORCH_VALUES = {
    str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
}


class SafeReader(filesystem.FileSystemReader):
    """Reads a checkpoint. See [Note: no code from files]."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which part of which tensor is where.

        Raises:
            ValueError: If the file holds anything else.
        """
        path = Path(self.path) / METADATA_NAME
        try:
            with path.open("rb") as file:
                read = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{path} is not the metadata of a checkpoint: {error}") from error
        if not isinstance(read, Metadata):
            raise ValueError(f"{path} is not the metadata of a checkpoint")
        if read.storage_meta is None:
            read.storage_meta = StorageMeta()
        read.storage_meta.load_id = self.load_id
        self._refuse_other_folders(read)
        return read

    def _refuse_other_folders(self, read: Metadata) -> None:
        infos = cast(dict[MetadataIndex, Any], read.storage_data or {})
        for name in {str(info.relative_path) for info in infos.values()}:
            if not is_plain_name(name) or (Path(self.path) / name).is_symlink():
                raise ValueError(f"{self.path}: the metadata names a file outside of the checkpoint: {name!r}")


class _MetadataUnpickler(pickle.Unpickler):
    # Any: classes, functions and dtypes.
    def find_class(self, module_name: str, global_name: str) -> Any:  # noqa: ANN401
        is_value = module_name == "torch" and global_name in _ALLOWED_TORCH_VALUES
        if is_value or (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no metadata needs")
