"""Python values of states as JSON: what a checkpoint holds beside tensors, read back without running code.

JSON has no tuples, bytes, dtypes and no keys but strings. Such values are objects of one entry, whose key begins with
``!``: ``(1, 2)`` is ``{"!tuple": [1, 2]}``.
"""

import base64
import json
import math
from typing import TypeAlias, cast

import torch

__all__ = ["Value", "from_json", "to_json"]

Value: TypeAlias = "bool | int | float | str | bytes | torch.dtype | torch.Size | list[Value] | tuple[Value, ...] | dict[Value, Value] | None"
"""What `to_json` takes. Values that equal one another may become one type: a NumPy float is read as a float."""
_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"

_MARK = "!"
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def to_json(value: Value, name: str) -> bytes:
    """Encode a value.

    Args:
        value: None, booleans, numbers, strings, bytes, dtypes and sizes, in lists, tuples and dictionaries.
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
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
        case list():
            return [_encoded(item, f"{name}[{index}]") for index, item in enumerate(value)]
        case torch.Size():  # a tuple too
            return {"!size": list(value)}
        case tuple():
            return {"!tuple": [_encoded(item, f"{name}[{index}]") for index, item in enumerate(value)]}
        case dict():
            return _encoded_dict(value, name)
        case bytes():
            return {"!bytes": base64.b64encode(value).decode()}
        case torch.dtype():
            return {"!dtype": str(value).removeprefix("torch.")}
        case _:
            raise TypeError(
                f"a checkpoint cannot hold {name}, of type {type(value).__module__}.{type(value).__qualname__}: nothing is "
                f"pickled. Make state_dict() return tensors, numbers, strings, bytes, and lists, tuples or dictionaries "
                f"of them."
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
        case "!dict", list():
            return {_decoded(key): _decoded(item) for key, item in cast(list[tuple[_Json, _Json]], content)}
        case "!bytes", str():
            return base64.b64decode(content, validate=True)
        case "!dtype", str():
            return _DTYPES[content]
        case _:
            raise ValueError(f"unknown mark {mark}")
