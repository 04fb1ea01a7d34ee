"""Python values of states as JSON: what a checkpoint holds beside tensors, read back without running code.

JSON has no tuples, sets, bytes, paths, dtypes, arrays and no keys but strings. Such values are objects of one entry, whose key
begins with ``!``: ``(1, 2)`` is ``{"!tuple": [1, 2]}``.
"""

import base64
import dataclasses
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch

__all__ = ["DTYPES", "TensorReference", "Value", "from_json", "to_json"]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorReference:
    """Stands for a tensor that is saved beside the value, see [Note: documents]."""

    path: str
    """Where the tensor is in the value."""


# `object`: a recursive type of all that can be saved would be longer than its checks.
Value: TypeAlias = object
"""What `to_json` takes: None, booleans, numbers, strings, bytes, paths, dtypes, sizes, NumPy arrays of numbers, `TensorReference`, and
lists, tuples, sets, dictionaries, ordered ones and counters of them."""
_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"

_MARK = "!"
_MAPPINGS: dict[type, str] = {OrderedDict: "!ordered", Counter: "!counter"}
_PATH_TYPE = type(Path())
_NUMPY_KINDS = "biuf"
"""Booleans, integers and floats."""
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""All dtypes, by name."""


def to_json(value: Value, name: str) -> bytes:
    """Encode a value.

    Args:
        value: See `Value`.
        name: Where the value is, for the error.

    Raises:
        TypeError: If something in it is none of these, with its place.
    """
    return json.dumps(_encoded(value, name), allow_nan=False, separators=(",", ":")).encode()


def from_json(text: bytes, name: str) -> Value:
    """Decode what `to_json` returned.

    Raises:
        ValueError: If the text is anything else.
    """
    try:
        return _decoded(cast(_Json, json.loads(text)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{name} does not hold a value that was saved as JSON: {error}") from error


# Exact types: what derives from one of them (named tuples, enumerations, masked arrays) would come back as something else.
def _encoded(value: object, name: str) -> _Json:
    kind = type(value)
    if kind is torch.Size:
        return {"!size": list(cast(torch.Size, value))}
    if kind is list:
        return _encoded_items(cast(list[object], value), name)
    if kind is tuple:
        return {"!tuple": _encoded_items(cast(tuple[object, ...], value), name)}
    if kind is set:
        # In an order that is the same in every process: two savings of one state give the same bytes.
        return {"!set": sorted((_encoded(item, name) for item in cast(set[object], value)), key=json.dumps)}
    if kind is dict:
        return _encoded_dict(cast(dict[object, object], value), name)
    if kind in _MAPPINGS:
        return {_MAPPINGS[kind]: _encoded_pairs(cast(dict[object, object], value), name)}
    return _encoded_leaf(value, name)


def _encoded_items(items: Iterable[object], name: str) -> list[_Json]:
    return [_encoded(item, f"{name}[{index}]") for index, item in enumerate(items)]


def _encoded_leaf(value: object, name: str) -> _Json:
    match value:
        case np.ndarray() | np.generic() if value.dtype.kind in _NUMPY_KINDS and not isinstance(
            value, np.ma.MaskedArray
        ):
            content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {"!numpy": [isinstance(value, np.generic), value.dtype.str, list(np.shape(value)), content]}
        case None:
            return None
        case bool() | int() | str() if type(value) in (bool, int, str):
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"!float": repr(value)}
        case bytes() if type(value) is bytes:
            return {"!bytes": base64.b64encode(value).decode()}
        case Path() if type(value) is _PATH_TYPE:
            return {"!path": str(value)}
        case torch.dtype():
            return {"!dtype": str(value).removeprefix("torch.")}
        case TensorReference():
            return {"!tensor": value.path}
        case _:
            raise TypeError(
                f"a checkpoint cannot hold {name}, of type {type(value).__module__}.{type(value).__qualname__}: nothing is "
                f"pickled. Make state_dict() return tensors, arrays, numbers, strings, bytes, and lists, tuples, sets or "
                f"dictionaries of them; wrap one whose form is not known beforehand in d9d.checkpoint.Document."
            )


def _encoded_dict(value: dict[object, object], name: str) -> _Json:
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {cast(str, key): _encoded(item, f"{name}.{key}") for key, item in value.items()}
    return {"!dict": _encoded_pairs(value, name)}


def _encoded_pairs(value: dict[object, object], name: str) -> list[_Json]:
    return [[_encoded(key, name), _encoded(item, f"{name}.{key}")] for key, item in value.items()]


def _decoded(value: _Json) -> Value:
    match value:
        case list():
            return [_decoded(item) for item in value]
        case dict() if len(value) == 1 and next(iter(value)).startswith(_MARK):
            ((mark, content),) = value.items()
            return _decoded_marked(mark, content)
        case dict():
            return {key: _decoded(item) for key, item in value.items()}
        case _:
            return value


def _decoded_marked(mark: str, content: _Json) -> Value:
    match mark, content:
        case "!float", str():
            return float(content)
        case "!size", list():
            return torch.Size(cast(list[int], content))
        case "!tuple", list():
            return tuple(_decoded(item) for item in content)
        case "!set", list():
            return {_decoded(item) for item in content}
        case "!tensor" | "!path", str():
            return TensorReference(content) if mark == "!tensor" else Path(content)
        case "!numpy", list():
            return _decoded_array(content)
        case "!dict" | "!ordered" | "!counter", list():
            pairs = [(_decoded(key), _decoded(item)) for key, item in cast(list[tuple[_Json, _Json]], content)]
            return {"!dict": dict, "!ordered": OrderedDict, "!counter": Counter}[mark](dict(pairs))
        case "!bytes" | "!dtype", str():
            return base64.b64decode(content, validate=True) if mark == "!bytes" else DTYPES[content]
        case _:
            raise ValueError(f"unknown mark {mark}")


def _decoded_array(content: list[_Json]) -> Value:
    match content:
        case [bool(is_number), str(dtype), list(shape), str(data)] if np.dtype(dtype).kind in _NUMPY_KINDS:
            array = np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(cast(list[int], shape))
            return array[()] if is_number else array.copy()
        case _:
            raise ValueError("an array of another kind")
