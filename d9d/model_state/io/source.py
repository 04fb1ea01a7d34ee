"""Open a model state: find out what it holds, without reading tensors, and read boxes of them on demand.

[Note: what a source checks]
Files of weights come from anywhere. The safetensors library checks that the tensors of one file lie inside it, one after
another, as long as their shapes say. This module checks what lies between files: that the index and the files agree, that
no tensor is there twice, and that no name leads out of the folder. All of it comes before the first tensor is read, and in
one error.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import torch
from safetensors import SafetensorError, safe_open

from d9d.model_state.io.dtypes import FILE_DTYPES
from d9d.model_state.io.files import ModelStateFiles, find_files, read_json_without_duplicates
from d9d.model_state.io.manifest import verify_manifest
from d9d.model_state.mapper.names import NearestNames, listed
from d9d.model_state.mapper.pieces import Box
from d9d.model_state.problems import raise_problems

__all__ = ["ModelStateExamination", "ModelStateSource", "TensorInfo", "examine_model_state", "open_model_state"]

_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a model state, not its data."""

    name: str
    file: Path
    """Where the data lie, links resolved."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStateExamination:
    """What there is to say about a model state that may be broken.

    Attributes:
        files: By name in the index, where each file lies.
        tensors: What could be found out, by name; in the order of the files and of the data in them.
        problems: Why it cannot be opened, one sentence each; empty if it can.
        notes: What is strange and does no harm, such as tensors that the index does not name.
    """

    files: Mapping[str, Path]
    tensors: Mapping[str, TensorInfo]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


class ModelStateSource(abc.ABC):
    """Tensors of a model state, read on demand. A context manager that closes it."""

    @property
    @abc.abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, in the order in which reading them goes through the files from start to end."""

    @abc.abstractmethod
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it, on the CPU.

        It may be a view of the mapped file, which is read as it is used: never write to it, and copy what must outlive the
        source.

        Args:
            name: One of `tensors`.
            box: The part; None for all of it.

        Raises:
            KeyError: If there is no such tensor.
            RuntimeError: If the source is closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_model_state(
    src_dir: Path | str, *, cache_root: Path | None = None, verify: bool = True, allow_bin: bool = False
) -> ModelStateSource:
    """Open a model state. Reads headers only, unless there is a manifest to verify. See [Note: what a source checks].

    Args:
        src_dir: A directory that holds ``model.safetensors.index.json``, or one ``.safetensors`` file; or the path of such
            a file.
        cache_root: A folder that links and names in the index may lead to, besides the directory itself: download caches
            keep the files elsewhere.
        verify: Whether to compare all bytes with the manifest, where one lies beside the files.
        allow_bin: Whether ``pytorch_model.bin`` may be read where there are no safetensors: plain tensors only.

    Raises:
        FileNotFoundError: If there is nothing at the path.
        ValueError: If anything is wrong with index, files or manifest; all of it in one error.
    """
    files = find_files(Path(src_dir), cache_root=cache_root, allow_bin=allow_bin)
    raise_problems(f"The model state in {src_dir}", files.problems)
    contents = _read_pickles(files) if files.is_pickle else _read_headers(files)
    raise_problems(f"The model state in {src_dir}", contents.problems)
    if verify:
        verify_manifest(files.directory, list(files.paths))
    return contents.source


def examine_model_state(
    src_dir: Path | str, *, cache_root: Path | None = None, allow_bin: bool = False
) -> ModelStateExamination:
    """Find out what a model state holds and what is wrong with it, as far as that can be told without reading tensors.

    Args:
        src_dir: As for `open_model_state`, as the others.
        cache_root: See there.
        allow_bin: See there.

    Raises:
        FileNotFoundError: If there is nothing at the path.
    """
    files = find_files(Path(src_dir), cache_root=cache_root, allow_bin=allow_bin)
    contents = _read_pickles(files) if files.is_pickle else _read_headers(files)
    return ModelStateExamination(
        files=files.paths,
        tensors=contents.source.tensors,
        problems=(*files.problems, *contents.problems),
        notes=tuple(contents.notes),
    )


class _SafetensorsSlice(Protocol):
    """What safetensors returns for a tensor that is not read yet."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class _SafetensorsFile(Protocol):
    """An open file of safetensors, which has no types of its own."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _SafetensorsSlice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class _SafetensorsSource(ModelStateSource):
    def __init__(self, tensors: Mapping[str, TensorInfo], open_files: Mapping[Path, _SafetensorsFile]) -> None:
        self._tensors = tensors
        self._open_files = dict(open_files)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        info = self._tensors[name]
        file = self._open_files.get(info.file)
        if file is None:
            raise RuntimeError(f"The model state is closed; {name} cannot be read any more.")
        if box is None or box.shape == info.shape:
            return file.get_tensor(name)
        return file.get_slice(name)[box.slices]

    def close(self) -> None:
        # The library unmaps a file with its last tensor.
        self._open_files.clear()


class _LoadedSource(ModelStateSource):
    """Tensors that torch.load has mapped."""

    def __init__(self, tensors: Mapping[str, TensorInfo], loaded: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._loaded = dict(loaded)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        info = self._tensors[name]
        if info.name not in self._loaded:
            raise RuntimeError(f"The model state is closed; {name} cannot be read any more.")
        return self._loaded[name][() if box is None else box.slices]

    def close(self) -> None:
        self._loaded.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class _Contents:
    """What the files of a model state turned out to hold."""

    source: ModelStateSource
    problems: list[str]
    notes: list[str]


def _read_headers(files: ModelStateFiles) -> _Contents:
    problems: list[str] = []
    open_files: dict[Path, _SafetensorsFile] = {}
    by_file: dict[str, list[TensorInfo]] = {}
    for name, path in files.paths.items():
        shown = files.directory / name
        try:
            # The library's own types leave out what a handle can do.
            open_files[path] = cast("_SafetensorsFile", safe_open(path, framework="pt"))  # pyright: ignore[reportUnknownArgumentType]
            starts = _read_starts(path)
        except (SafetensorError, OSError, ValueError) as error:
            problems.append(f"{shown} cannot be read: {error}. It is damaged or no safetensors file: fetch it again.")
        else:
            by_file[name] = _infos(shown, path, open_files[path], starts, problems)
    tensors, notes = _merge(files, by_file, problems)
    return _Contents(_SafetensorsSource(tensors, open_files), problems, notes)


def _read_starts(path: Path) -> dict[str, int]:
    """Return where each tensor begins, of a file that the library has accepted.

    Raises:
        ValueError: If the header has a tensor twice, of which the library takes one in silence.
    """
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {num_bytes} bytes, more than {_MAX_HEADER_BYTES}")
        header = cast("dict[str, dict[str, list[int]]]", read_json_without_duplicates(file.read(num_bytes)))
    return {name: entry["data_offsets"][0] for name, entry in header.items() if "data_offsets" in entry}


def _infos(
    shown: Path, path: Path, file: _SafetensorsFile, starts: Mapping[str, int], problems: list[str]
) -> list[TensorInfo]:
    infos: list[TensorInfo] = []
    unknown: dict[str, list[str]] = {}
    for name in sorted(file.keys(), key=lambda name: (starts.get(name, 0), name)):
        entry = file.get_slice(name)
        shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
        if dtype in FILE_DTYPES:
            infos.append(_info(name, path, shape, FILE_DTYPES[dtype]))
        else:
            unknown.setdefault(dtype, []).append(name)
    problems.extend(
        f"{shown} holds tensors of the dtype {dtype}, which is not supported: {listed(names)}."
        for dtype, names in sorted(unknown.items())
    )
    return infos


def _read_pickles(files: ModelStateFiles) -> _Contents:
    """Map files of PyTorch's own format. Nothing but plain tensors gets through."""
    problems: list[str] = []
    loaded: dict[str, torch.Tensor] = {}
    by_file: dict[str, list[TensorInfo]] = {}
    for name, path in files.paths.items():
        shown = files.directory / name
        try:
            content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # noqa: BLE001  # reported; what comes out of a broken pickle is of any class
            reason = str(error).split("\n", 1)[0]
            problems.append(f"{shown} cannot be read as plain tensors: {reason}")
            continue
        entries = cast("dict[object, object]", content) if isinstance(content, dict) else {}
        plain = {
            key: value
            for key, value in entries.items()
            if isinstance(key, str) and type(value) is torch.Tensor and value.layout == torch.strided
        }
        if not isinstance(content, dict) or len(plain) != len(entries):
            odd = listed(str(key) for key in entries if key not in plain)
            problems.append(
                f"{shown} holds something else than plain tensors by name: {odd or type(content).__name__}."
            )
        by_file[name] = [_info(key, path, tuple(value.shape), value.dtype) for key, value in plain.items()]
        loaded.update(plain)
    tensors, notes = _merge(files, by_file, problems)
    return _Contents(_LoadedSource(tensors, loaded), problems, notes)


def _info(name: str, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
    return TensorInfo(name, path, shape, dtype, math.prod(shape) * dtype.itemsize)


def _merge(
    files: ModelStateFiles, by_file: Mapping[str, list[TensorInfo]], problems: list[str]
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Put the tensors of all files together, and compare them with the index.

    Returns:
        Those that the index names, or all without one; and what is strange about the others.
    """
    found: dict[str, tuple[str, TensorInfo]] = {}
    notes: list[str] = []
    unnamed: dict[str, list[str]] = {}
    for file_name, infos in by_file.items():
        for info in infos:
            if info.name in found:
                other = found[info.name][0]
                problems.append(f"{info.name!r} is in two files of {files.directory}: {other} and {file_name}.")
            if info.name not in found or (files.weight_map or {}).get(info.name) == file_name:
                found[info.name] = (file_name, info)
            if files.weight_map is not None and info.name not in files.weight_map:
                unnamed.setdefault(file_name, []).append(info.name)
    notes.extend(
        f"{files.directory / name} holds tensors that the index does not name: {listed(names)}."
        for name, names in unnamed.items()
    )
    if files.weight_map is None:
        return {name: info for name, (_, info) in found.items()}, notes
    _compare_with_index(files, {name: file for name, (file, _) in found.items()}, by_file, problems)
    return {name: info for name, (_, info) in found.items() if name in files.weight_map}, notes


def _compare_with_index(
    files: ModelStateFiles, found: Mapping[str, str], by_file: Mapping[str, object], problems: list[str]
) -> None:
    absent: dict[str, list[str]] = {}
    for name, file in (files.weight_map or {}).items():
        # Files that could not be opened are reported as such, not for each of their tensors.
        if file not in by_file:
            continue
        if name not in found:
            absent.setdefault(file, []).append(name)
        elif found[name] != file:
            problems.append(f"The index of {files.directory} names {file} for {name!r}, which is in {found[name]}.")
    problems.extend(
        f"The index of {files.directory} names tensors that {file} does not hold: {NearestNames(found).described(names)}."
        for file, names in sorted(absent.items())
    )
