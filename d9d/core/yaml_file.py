"""Read files of settings that somebody else may have written."""

from pathlib import Path
from typing import Any, cast

import yaml

__all__ = ["read_yaml"]

_MAX_BYTES = 1 << 20
_MAX_VALUES = 100_000
_MERGE = "tag:yaml.org,2002:merge"


# Any: a file holds whatever somebody has written; its reader checks it.
def read_yaml(path: Path) -> Any:  # noqa: ANN401
    """Read a YAML file of plain values: numbers, strings, lists and mappings. Anchors and merges are fine.

    A key that stands twice in a mapping is refused: YAML would take the last one in silence.

    Raises:
        ValueError: If it is no such file, or so large that it is no file of settings; with its path.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES} bytes: it is no file of settings.")
    try:
        content, repeated = _load(data)
        num_values = _count(content, {})
    except (yaml.YAMLError, ValueError) as error:  # dates and numbers that are none
        raise ValueError(f"{path} is no YAML file: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} holds values in values too deeply, or in themselves.") from error
    if num_values > _MAX_VALUES:
        # A few hundred bytes of aliases of aliases are millions of values for whoever walks over them.
        raise ValueError(f"{path} has {num_values} values, aliases counted each time: it is no file of settings.")
    if repeated:
        raise ValueError(f"{path}: {'; '.join(repeated)}. Remove all but one of each.")
    return content


def _load(data: bytes) -> tuple[Any, list[str]]:
    """Return what a document holds, and which keys stand in one mapping twice."""
    loader = yaml.SafeLoader(data)
    try:
        root = loader.get_single_node()
        repeated = _repeated_keys(loader, root)
        return None if root is None else loader.construct_document(root), repeated
    finally:
        loader.dispose()


def _repeated_keys(loader: yaml.SafeLoader, root: yaml.Node | None) -> list[str]:
    """Look at keys as they are written, before those of merged mappings come among them."""
    repeated: list[str] = []
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
            lines: dict[object, int] = {}
            for key_node, _ in node.value:
                if isinstance(key_node, yaml.ScalarNode) and key_node.tag != _MERGE:
                    key, line = loader.construct_object(key_node), key_node.start_mark.line + 1
                    if key in lines:
                        repeated.append(f"line {line} repeats {key!r} of line {lines[key]}")
                    lines.setdefault(key, line)
    return repeated


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
