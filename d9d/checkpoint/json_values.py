"""Python values of states as JSON: what a checkpoint holds beside tensors, read back without running code.

JSON has no tuples, sets, bytes, dtypes, arrays and no keys but strings. Such values are objects of one entry, whose key
begins with ``!``: ``(1, 2)`` is ``{"!tuple": [1, 2]}``.
"""

import base64
import dataclasses
import json
import math
from typing import TypeAlias, cast

import numpy as np
import torch

__all__ = ["TensorReference", "Value", "from_json", "to_json"]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorReference:
    """Stands for a tensor that is saved beside the value, see [Note: documents]."""

    number: str


# `object`: a recursive type of all that can be saved would be longer than its checks.
Value: TypeAlias = object
"""What `to_json` takes: None, booleans, numbers, strings, bytes, dtypes, sizes, NumPy arrays of numbers, `TensorReference`, and
lists, tuples, sets and dictionaries of them. NumPy numbers are read as arrays without dimensions are: as NumPy numbers."""
_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"

_MARK = "!"
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


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


def _encoded(value: object, name: str) -> _Json:
    match value:
        case torch.Size():  # a tuple too
            return {"!size": list(value)}
        case list():
            return [_encoded(item, f"{name}[{index}]") for index, item in enumerate(value)]
        case tuple():
            return {"!tuple": [_encoded(item, f"{name}[{index}]") for index, item in enumerate(value)]}
        case set():
            # In an order that is the same in every process: two savings of one state give the same bytes.
            return {"!set": sorted((_encoded(item, name) for item in value), key=json.dumps)}
        case dict():
            return _encoded_dict(value, name)
        case _:
            return _encoded_leaf(value, name)


def _encoded_leaf(value: object, name: str) -> _Json:
    match value:
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {"!numpy": [isinstance(value, np.generic), value.dtype.str, list(np.shape(value)), content]}
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
        case bytes():
            return {"!bytes": base64.b64encode(value).decode()}
        case torch.dtype():
            return {"!dtype": str(value).removeprefix("torch.")}
        case TensorReference():
            return {"!tensor": value.number}
        case _:
            raise TypeError(
                f"a checkpoint cannot hold {name}, of type {type(value).__module__}.{type(value).__qualname__}: nothing is "
                f"pickled. Make state_dict() return tensors, arrays, numbers, strings, bytes, and lists, tuples, sets or "
                f"dictionaries of them."
            )


def _encoded_dict(value: dict[object, object], name: str) -> _Json:
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {cast(str, key): _encoded(item, f"{name}.{key}") for key, item in value.items()}
    return {"!dict": [[_encoded(key, name), _encoded(item, f"{name}.{key}")] for key, item in value.items()]}


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
        case "!tensor", str():
            return TensorReference(content)
        case "!numpy", [bool(is_number), str(dtype), list(shape), str(data)]:
            array = np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(cast(list[int], shape))
            return array[()] if is_number else array.copy()
        case "!dict", list():
            return {_decoded(key): _decoded(item) for key, item in cast(list[tuple[_Json, _Json]], content)}
        case "!bytes", str():
            return base64.b64decode(content, validate=True)
        case "!dtype", str():
            return _DTYPES[content]
        case _:
            raise ValueError(f"unknown mark {mark}")
