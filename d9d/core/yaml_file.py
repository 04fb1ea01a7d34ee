"""Read files of settings that somebody else may have written."""

from pathlib import Path
from typing import Any, cast

import yaml

__all__ = ["read_yaml"]

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000


# Any: a file holds whatever somebody has written; its reader checks it.
def read_yaml(path: Path) -> Any:  # noqa: ANN401
    """Read a YAML file of plain values: numbers, strings, lists and mappings. Anchors and merges are fine.

    Raises:
        ValueError: If it is no such file, or so large that it is no file of settings; with its path.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES} bytes: it is no file of settings.")
    try:
        content = yaml.safe_load(data)
        num_values = _count(content, {})
    except (yaml.YAMLError, ValueError) as error:  # dates and numbers that are none
        raise ValueError(f"{path} is no YAML file: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} holds values in values too deeply, or in themselves.") from error
    if num_values > _MAX_VALUES:
        # A few hundred bytes of aliases of aliases are millions of values for whoever walks over them.
        raise ValueError(f"{path} has {num_values} values, aliases counted each time: it is no file of settings.")
    return content


def _count(value: object, counts: dict[int, int]) -> int:
    """Count a value and all in it, as often as it is reached, without walking over anything twice."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counts:
        if isinstance(value, dict):
            children = list(cast(dict[object, object], value).values())
        else:
            children = cast(list[object], value)
        counts[id(value)] = 1 + sum(_count(child, counts) for child in children)
    return counts[id(value)]
