"""Find the files of a model state, and trust none of the names in its index."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import cast

from d9d.model_state.mapper.names import listed

__all__ = ["INDEX_NAME", "SINGLE_NAME", "ModelStateFiles", "find_files", "read_json_without_duplicates"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_BIN_SINGLE_NAME = "pytorch_model.bin"
_BIN_INDEX_NAME = "pytorch_model.bin.index.json"
_INDEX_SUFFIX = ".index.json"

_MAX_INDEX_BYTES = 64 * 2**20
"""An index of 20,000 tensors takes 2 MB."""

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(safetensors|bin)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStateFiles:
    """Files of a model state, as far as they can be told without opening them.

    Attributes:
        directory: The folder that names in the index are relative to.
        paths: By name in the index, sorted, where each file lies; those that may not be used are left out.
        weight_map: The file that the index gives for each tensor; None without an index.
        is_pickle: Whether the files are of PyTorch's own format.
        problems: What is wrong, one sentence each.
    """

    directory: Path
    paths: dict[str, Path]
    weight_map: dict[str, str] | None
    is_pickle: bool
    problems: tuple[str, ...]


def find_files(src: Path, *, cache_root: Path | None, allow_bin: bool) -> ModelStateFiles:
    """Find the files of a model state.

    Args:
        src: A directory, an index, or one file of tensors.
        cache_root: Folder that files may lie below, besides the directory itself.
        allow_bin: Whether PyTorch's own format may be read.

    Raises:
        FileNotFoundError: If there is nothing at ``src``.
    """
    if not src.exists():
        raise FileNotFoundError(
            f"There is no model state at {src}: expected a directory with {INDEX_NAME} or {SINGLE_NAME}, or the path "
            f"of one .safetensors file."
        )
    directory = src if src.is_dir() else src.parent
    problems: list[str] = []
    main = _main_file(src, allow_bin, problems) if src.is_dir() else src.name
    if main is None:
        return ModelStateFiles(
            directory=directory, paths={}, weight_map=None, is_pickle=False, problems=tuple(problems)
        )
    is_pickle = main.removesuffix(_INDEX_SUFFIX).endswith(".bin")
    if is_pickle and not allow_bin:
        problems.append(_refuse_bin(directory / main))
        return ModelStateFiles(directory=directory, paths={}, weight_map=None, is_pickle=True, problems=tuple(problems))
    roots = [root.resolve() for root in (directory, cache_root) if root is not None]
    weight_map = None
    names = [main]
    if main.endswith(_INDEX_SUFFIX):
        weight_map = _read_index(directory, main, roots, problems)
        names = sorted(set(weight_map.values()))
        if src.is_dir() and main == INDEX_NAME and SINGLE_NAME not in names and (src / SINGLE_NAME).exists():
            problems.append(
                f"{src} holds both {INDEX_NAME}, and {SINGLE_NAME}, which it does not name: tools differ in which they "
                f"take. Remove one of them, or give the path of the one you mean."
            )
    paths = _resolve_all(directory, names, roots, problems, may_have_folders=cache_root is not None)
    return ModelStateFiles(
        directory=directory, paths=paths, weight_map=weight_map, is_pickle=is_pickle, problems=tuple(problems)
    )


def read_json_without_duplicates(text: bytes) -> object:
    """Parse JSON in which no object may have a key twice.

    Raises:
        ValueError: If it is no JSON, nested too deeply, or has such a key, which it names.
    """

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = {key for key, _ in pairs if key in seen or seen.add(key)}
            raise ValueError(f"a key occurs twice: {listed(twice)}")
        return result

    try:
        return json.loads(text, object_pairs_hook=build)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _main_file(src: Path, allow_bin: bool, problems: list[str]) -> str | None:
    """Return the file of a directory that says where everything is: an index, or the only file of tensors."""
    for name in (INDEX_NAME, SINGLE_NAME):
        # A link that leads nowhere counts: it is reported as a missing file.
        if os.path.lexists(src / name):
            return name
    found = sorted(path.name for path in src.glob("*.safetensors"))
    leftovers = [name for name in found if name.startswith(".")]
    found = [name for name in found if not name.startswith(".")]
    shards = [name for name in found if (match := _SHARD.search(name)) and int(match[2]) != 1]
    # Beside what a stopped export has left, another file is not what was exported there.
    if len(found) == 1 and not shards and not leftovers:
        return found[0]
    if not found and not leftovers:
        for name in (_BIN_INDEX_NAME, _BIN_SINGLE_NAME):
            if os.path.lexists(src / name):
                return name
    problems.append(_nothing_usable(src, found, leftovers, shards))
    return None


def _nothing_usable(src: Path, found: list[str], leftovers: list[str], shards: list[str]) -> str:
    if shards or leftovers:
        reason = "an export that was stopped" if leftovers else "a download or an export that was stopped"
        instead = " Or give the path of the file that you mean." if found and not shards else ""
        return (
            f"{src} holds shards of a model state, but no {INDEX_NAME}: {listed([*found, *leftovers])}. It is not "
            f"complete, as after {reason}: fetch or export it again.{instead}"
        )
    if found:
        return (
            f"{src} holds several .safetensors files, but no {INDEX_NAME} that says what belongs together: "
            f"{listed(found)}. Give the path of one of them."
        )
    there = listed(path.name for path in src.iterdir())
    return f"{src} holds no model state: expected {INDEX_NAME} or a .safetensors file; there is {there or 'nothing'}."


def _refuse_bin(path: Path) -> str:
    return (
        f"{path} is in PyTorch's own format, a pickle, which may run code of its author when it is read. Convert it to "
        f".safetensors where you trust it: python -m d9d convert SRC DST --allow-bin reads nothing but plain tensors (torch.load "
        f"with weights_only=True), and so does allow_bin=True of the functions that load."
    )


def _read_index(directory: Path, name: str, roots: list[Path], problems: list[str]) -> dict[str, str]:
    """Return the file of each tensor; what cannot be used is left out and reported."""
    resolved = _resolve_all(directory, [name], roots, problems, may_have_folders=False)
    if not resolved:
        return {}
    path = directory / name
    try:
        with resolved[name].open("rb") as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
        if len(text) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES} bytes")
        index = read_json_without_duplicates(text)
    except (OSError, ValueError) as error:
        problems.append(f"The index {path} cannot be read: {error}.")
        return {}
    weight_map = cast("Mapping[str, object]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(
            f'The index {path} has no "weight_map", an object that gives the file of each tensor by the tensor\'s name.'
        )
        return {}
    entries = cast("dict[str, object]", weight_map)
    wrong = [key for key, value in entries.items() if not isinstance(value, str)]
    if wrong:
        problems.append(f"The index {path} gives something else than the name of a file for {listed(wrong)}.")
    return {key: value for key, value in entries.items() if isinstance(value, str)}


def _resolve_all(
    directory: Path, names: list[str], roots: list[Path], problems: list[str], *, may_have_folders: bool
) -> dict[str, Path]:
    """Return where the files of an index lie; those that may not be used are left out and reported."""
    paths: dict[str, Path] = {}
    missing: list[str] = []
    for name in names:
        if reason := _refuse_name(name, may_have_folders):
            problems.append(f"The index of {directory} names the file {name!r}, {reason}.")
            continue
        # What a link leads to is opened afterwards, not the link, which could be exchanged in between.
        path = Path(os.path.realpath(directory / name))
        if not any(path.is_relative_to(root) for root in roots):
            problems.append(
                f"{directory / name} links to {path}, which lies outside {roots[0]}. If that is a download cache, "
                f"pass the folder that holds both as cache_root."
            )
        elif not path.exists():
            missing.append(name)
        elif not path.is_file():
            problems.append(f"{directory / name} is not a file.")
        else:
            paths[name] = path
    if missing:
        problems.append(
            f"{len(missing)} of {len(names)} files of the model state in {directory} are missing: "
            f"{listed(missing)}. Fetch or export it again."
        )
    return paths


def _refuse_name(name: str, may_have_folders: bool) -> str | None:
    """Return why an index may not name a file like this."""
    try:
        too_long = any(len(os.fsencode(part)) > 255 for part in name.split("/"))
    except UnicodeEncodeError:
        return "which is no text that a file system can hold"
    parts = name.split("/")
    if not name or "\0" in name:
        return "which is no name of a file"
    if too_long or len(name) > 4096:
        return "which is too long for the name of a file"
    if "\\" in name or PureWindowsPath(name).drive:
        return "which is a path of another system; names in an index are relative to its folder"
    if name.startswith("/"):
        return "which is an absolute path; names in an index are relative to its folder"
    if any(part in ("", ".", "..") for part in parts):
        return "which may lead out of the folder of the index"
    if len(parts) > 1 and not may_have_folders:
        return "which lies in another folder; pass cache_root, the folder that all files lie below, if that is meant"
    return None
