"""States of a form that only their owners know, such as those of tasks and data streams.

[Note: documents]
A distributed checkpoint holds flat names. Whoever loads one must know them, which holds for weights: the model is built
first. A task may save a dictionary that grows, with numbers for keys. Such a state is marked as a `Document`. It is saved as
one value, with its tensors beside it, and comes back as it was whatever the job has in its place.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from d9d.checkpoint.json_values import TensorReference, to_json

__all__ = ["Document", "check_document", "document_key", "expanded", "filled", "with_room"]

_VALUE, _TENSORS = "#document", "#tensors"
"""Keys of the parts of a document, which nobody else uses."""

# `Any` in this module: states hold what their owners choose.


@dataclasses.dataclass(slots=True)
class Document:
    """Marks a state that is saved as one value. See [Note: documents]."""

    value: Any


def check_document(value: Any, name: str) -> None:  # noqa: ANN401
    """Refuse a value that a `Document` cannot hold.

    Args:
        value: The value.
        name: Where it is, for the error.

    Raises:
        TypeError: With the place of what cannot be saved.
    """
    to_json(_saved_form(value)[_VALUE][0], name)


def expanded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with documents in the form in which they are saved."""
    return _replacing_documents(state, lambda _, document: _saved_form(document.value))


def with_room(state: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Return a state with room for the documents that a checkpoint holds, in the form in which they are saved."""
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        key, mark, path = name.partition(f".{_TENSORS}.")
        if mark and isinstance(entry, TensorStorageMetadata):
            saved.setdefault(key, {})[path] = entry

    def room(key: str, document: Document) -> dict[str, Any]:
        own = _saved_form(document.value)[_TENSORS]
        tensors = {path: _room(entry, own.get(path)) for path, entry in saved.get(key, {}).items()}
        return {_VALUE: None, _TENSORS: tensors}

    return _replacing_documents(state, room)


def filled(state: Mapping[str, Any], saved_form: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it has been read.

    Args:
        state: With documents.
        saved_form: What `with_room` returned for it, after it was read.
    """
    read: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Document):
            read[key] = _value_of(saved_form[key])
        elif isinstance(value, Mapping):
            read[key] = filled(value, saved_form[key])
        else:
            read[key] = saved_form[key]
    return read


def _replacing_documents(
    state: Mapping[str, Any], replace: Callable[[str, Document], Any], prefix: str = ""
) -> dict[str, Any]:
    replaced: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Document):
            replaced[key] = replace(f"{prefix}{key}", value)
        elif isinstance(value, Mapping):
            replaced[key] = _replacing_documents(value, replace, f"{prefix}{key}.")
        else:
            replaced[key] = value
    return replaced


def _saved_form(value: Any) -> dict[str, Any]:  # noqa: ANN401
    tensors: dict[str, torch.Tensor] = {}

    def reference(leaf: Any, path: str) -> Any:  # noqa: ANN401
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors[path] = leaf
        return TensorReference(path)

    # In a tuple: PyTorch takes dictionaries apart, and leaves tuples whole.
    return {_VALUE: (_walked(value, reference),), _TENSORS: tensors}


def _value_of(saved_form: Mapping[str, Any]) -> Any:  # noqa: ANN401
    tensors: dict[str, torch.Tensor] = saved_form[_TENSORS]
    (value,) = saved_form[_VALUE]
    return _walked(value, lambda leaf, _: tensors[leaf.path] if isinstance(leaf, TensorReference) else leaf)


def _walked(value: Any, leaf: Callable[[Any, str], Any], path: str = "") -> Any:  # noqa: ANN401
    """Replace leaves. A path has the keys and indices that lead to a leaf: the same on ranks that fill a dict in other orders."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(_walked(item, leaf, f"{path}/{index}") for index, item in enumerate(value))
    if kind in (dict, OrderedDict):
        return kind((key, _walked(item, leaf, f"{path}/{key!r}")) for key, item in value.items())
    return leaf(value, path)


def document_key(name: str) -> str | None:
    """Return the key of the document that a saved name is a part of, if it is one."""
    for part in (_VALUE, _TENSORS):
        key, mark, rest = name.partition(f".{part}")
        if mark and (rest == "" or rest.startswith(".")):
            return key
    return None


def _room(saved: TensorStorageMetadata, own: torch.Tensor | None) -> torch.Tensor:
    """Allocate a tensor to read one to: laid out like what the job has in its place, if that fits."""
    if isinstance(own, DTensor) and own.shape == saved.size and own.dtype == saved.properties.dtype:
        return torch.empty_like(own)
    return torch.empty(saved.size, dtype=saved.properties.dtype)
