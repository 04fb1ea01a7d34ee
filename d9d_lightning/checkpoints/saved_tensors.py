"""State dicts whose tensors stay in the files of a checkpoint until they are needed.

[Note: tensors that stay in the files]
Lightning loads a checkpoint before the module is distributed, and shows it to hooks. With whole tensors each rank would need
memory for all of a model and its optimizer. So hooks see mappings that read a tensor when it is asked for, and the strategy
reads what is left, on each rank what this rank has of it.
"""

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from typing_extensions import override

from d9d.checkpoint import load_document, read_metadata
from d9d.checkpoint.load import read_flat
from d9d.core.placement import like_parameter, local_tensor

__all__ = ["SavedFiles", "SavedTensors", "load_tensors"]

# `Any` in this module: states hold what their owners choose.


class SavedFiles:
    """The tensors and documents of a checkpoint. No communication.

    Args:
        path: Its folder, whose files have been verified.

    Raises:
        ValueError: If it does not say what it holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """Folder of the checkpoint."""
        self._metadata = read_metadata(path)

    def read_document(self, key: str) -> Any:  # noqa: ANN401
        """Return a document.

        Raises:
            ValueError: If the checkpoint has none of that name.
        """
        return load_document(self.path, key, self._metadata)

    def has(self, key: str) -> bool:
        """Tell whether there is a tensor of that name."""
        return isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def room_for(self, key: str, like: torch.Tensor | None) -> torch.Tensor:
        """Allocate a tensor to read to: laid out like another one if that has its shape, else whole on the host."""
        saved = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[key])
        dtype = saved.properties.dtype
        if isinstance(like, DTensor) and like.shape == saved.size:
            return like_parameter(torch.empty_like(local_tensor(like), dtype=dtype, requires_grad=False), like)
        return torch.empty(saved.size, dtype=dtype)

    def read_into(self, rooms: dict[str, torch.Tensor]) -> None:
        """Read tensors, each to its room."""
        if rooms:
            read_flat(self.path, cast(dict[str, Any], rooms), self._metadata)


class SavedTensors(MutableMapping[str, Any]):
    """A state dict in a checkpoint. See [Note: tensors that stay in the files].

    A tensor that was asked for is kept, and may be changed; so may the mapping.

    Args:
        files: The checkpoint.
        path: Where the state dict is in it.
        held: For each key a list: empty for a tensor, else with the value.
        versions: Versions of modules, which torch keeps beside a state dict.

    Raises:
        ValueError: If a tensor is not there.
    """

    def __init__(
        self,
        files: SavedFiles,
        path: tuple[str, ...],
        held: Mapping[str, list[Any]],
        versions: Mapping[str, Any] | None = None,
    ) -> None:
        self._files = files
        self._path = path
        self._values: dict[str, list[Any]] = {key: list(value) for key, value in held.items()}
        missing = [key for key, value in self._values.items() if not value and not files.has(self._saved_name(key))]
        if missing:
            raise ValueError(f"{files.path} does not hold {', '.join(map(self._saved_name, missing[:3]))}")
        if versions is not None:
            # Under the name that torch looks for.
            self._metadata = OrderedDict(versions)

    def _saved_name(self, key: str) -> str:
        return ".".join((*self._path, key))

    @override
    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not value:
            name = self._saved_name(key)
            room = self._files.room_for(name, None)
            self._files.read_into({name: room})
            value.append(room)
        return value[0]

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = [value]

    @override
    def __delitem__(self, key: str) -> None:
        del self._values[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._values)})"

    def __or__(self, other: Mapping[str, Any]) -> OrderedDict[str, Any]:
        return OrderedDict(self.copy() | dict(other))

    def __ror__(self, other: Mapping[str, Any]) -> OrderedDict[str, Any]:
        return OrderedDict(dict(other) | self.copy())

    def copy(self) -> OrderedDict[str, Any]:
        """Return a state dict with all tensors in memory, whole, as torch has them."""
        return load_tensors([(self, {})])[0]

    def without(self, keys: Collection[str]) -> "SavedTensors":
        """Return the same state dict without some keys; what was asked for is shared."""
        other = copy.copy(self)
        other._values = {key: value for key, value in self._values.items() if key not in keys}
        return other

    def unread(self) -> dict[str, str]:
        """Return the keys of tensors that are in the files only, with their names there."""
        return {key: self._saved_name(key) for key, value in self._values.items() if not value}

    @property
    def files(self) -> SavedFiles:
        """The checkpoint."""
        return self._files


def load_tensors(
    wanted: Sequence[tuple[SavedTensors, Mapping[str, torch.Tensor | None]]],
) -> list[OrderedDict[str, Any]]:
    """Read state dicts of one checkpoint at once. No communication.

    Args:
        wanted: State dicts, each with tensors that say how those of the same key are laid out; others are read whole.

    Returns:
        Plain state dicts. What was asked for or set before is as it is in the mapping.
    """
    rooms: dict[str, torch.Tensor] = {}
    for state, like in wanted:
        rooms |= {name: state.files.room_for(name, like.get(key)) for key, name in state.unread().items()}
    if wanted:
        wanted[0][0].files.read_into(rooms)
    loaded: list[OrderedDict[str, Any]] = []
    for state, _ in wanted:
        unread = state.unread()
        plain = OrderedDict((key, rooms[unread[key]] if key in unread else state[key]) for key in state)
        vars(plain).update({name: value for name, value in vars(state).items() if name == "_metadata"})
        loaded.append(plain)
    return loaded
