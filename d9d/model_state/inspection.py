"""Looks at model states without loading them: what they hold, what is wrong with them, and what a mapper would do."""

import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from d9d.model_state.io.files import INDEX_NAME, SINGLE_NAME, read_json_without_duplicates
from d9d.model_state.io.manifest import MANIFEST_NAME, verify_manifest
from d9d.model_state.io.reader import foresee_group, missing_text, order_groups
from d9d.model_state.io.source import ModelStateExamination, TensorInfo, examine_model_state
from d9d.model_state.mapper.base import ModelStateMapper, runnable_groups
from d9d.model_state.mapper.check import check_mapper
from d9d.model_state.mapper.names import listed
from d9d.model_state.mapper.pieces import TensorPieces

__all__ = [
    "DryRun",
    "Inspection",
    "counted",
    "dry_run",
    "format_dry_run",
    "format_inspection",
    "format_size",
    "inspect_model_state",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found in a folder."""

    directory: Path
    files: Mapping[Path, str]
    """Names of the files in the folder, by where their data lie."""
    tensors: tuple[TensorInfo, ...]
    """Tensors by name, as far as they can be told."""
    problems: tuple[str, ...]
    """What is wrong; empty if the model state is whole."""


# ---- What is wrong ---------------------------------------------------------------------------------------------------


def inspect_model_state(
    directory: Path, *, cache_root: Path | None = None, allow_bin: bool = False, verify: bool = True
) -> Inspection:
    """Look at all files of a model state, however broken it is, and collect everything that is wrong.

    Reads headers only, and with a manifest the content too, for its checksums.

    Args:
        directory: Folder of the model state, or one file; as for `open_model_state`.
        cache_root: See there.
        allow_bin: See there.
        verify: Whether to check the manifest, if there is one.

    Raises:
        FileNotFoundError: If there is nothing there.
    """
    found = examine_model_state(directory, cache_root=cache_root, allow_bin=allow_bin)
    problems = [*found.problems, *found.notes]
    files = dict(found.files)
    tensors = list(found.tensors.values())
    if directory.is_dir():
        has_index = (directory / INDEX_NAME).exists()
        for path in _other_files(directory, found, has_index):
            other = examine_model_state(path)
            files |= other.files
            tensors += other.tensors.values()
            problems += other.problems
            if has_index:
                problems.append(f"{path} is not in the index, so nobody reads it.")
        problems += [*_leftover_problems(directory), *_total_size_problems(directory, found)]
        if verify:
            problems += _manifest_problems(directory, files)
    return Inspection(
        directory=directory,
        files={path: name for name, path in files.items()},
        tensors=tuple(sorted(tensors, key=lambda info: (info.name, info.file))),
        problems=tuple(dict.fromkeys(problems)),
    )


def _other_files(directory: Path, found: ModelStateExamination, has_index: bool) -> list[Path]:
    """Return the files that no one looks into who reads the model state; all of them where it cannot be read."""
    known = {*found.files, *([SINGLE_NAME] if has_index else [])}  # both together are a problem that is found already
    root = directory.resolve()
    return [
        path
        for path in sorted(directory.glob("*.safetensors"))
        if path.name not in known and not path.name.startswith(".") and path.resolve().is_relative_to(root)
    ]


def _leftover_problems(directory: Path) -> Iterator[str]:
    if leftovers := [path.name for path in directory.glob(".tmp-*")]:
        yield (
            f"{directory} holds what an export has left that was killed, or that runs just now: {listed(leftovers)}. "
            "The next export there removes it."
        )


def _total_size_problems(directory: Path, found: ModelStateExamination) -> Iterator[str]:
    path = directory / INDEX_NAME
    if found.problems or not path.is_file():
        return
    index = read_json_without_duplicates(path.read_bytes())
    metadata = index.get("metadata") if isinstance(index, dict) else None
    expected = sum(info.num_bytes for info in found.tensors.values())
    total = metadata.get("total_size", expected) if isinstance(metadata, dict) else expected
    if total != expected:
        yield f"The index {path} says that total_size is {total}, but the tensors take {expected} bytes."


def _manifest_problems(directory: Path, files: Iterable[str]) -> Iterator[str]:
    """Check the files that are there, and those that the manifest names."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return
    try:
        manifest = read_json_without_duplicates(path.read_bytes())
        named = [str(name) for name in manifest if "/" not in str(name)] if isinstance(manifest, dict) else []
        verify_manifest(directory, {*files, *named})
    except (ValueError, OSError) as error:
        yield str(error) if str(path.name) in str(error) else f"{path} cannot be read: {error}."


# ---- What a mapper would do ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a mapper would make of a model state, as far as that shows without data."""

    outputs: dict[str, TensorPieces | torch.Tensor | None]
    """Every tensor that the mapper makes, by name: pieces of the source, or no more than a shape and a dtype (a tensor on the
    meta device); None where only data tells these."""
    unread: tuple[str, ...]
    """Tensors that the mapper does not ask for, by name."""
    problems: tuple[str, ...]
    """Why it would fail."""


def dry_run(mapper: ModelStateMapper, tensors: Mapping[str, TensorInfo]) -> DryRun:
    """Try a mapper on the names, shapes and dtypes of a model state, without reading any data.

    Args:
        mapper: The mapper.
        tensors: All tensors of the model state, by name.
    """
    groups = mapper.state_dependency_groups()
    wanted = {name for group in groups for name in group.inputs}
    outputs: dict[str, TensorPieces | torch.Tensor | None] = {name: None for group in groups for name in group.outputs}
    problems: list[str] = []
    try:
        check_mapper(mapper, sources=tensors.keys())
    except ValueError as error:
        problems += [line.strip() for line in str(error).splitlines()]
    else:
        runnable, lacking = runnable_groups(mapper, tensors.keys())
        problems += [
            f"{group} has nothing to be made of: {missing_text(names, tensors)}" for group, names in lacking.items()
        ]
        for readable in order_groups(runnable, tensors):
            try:
                inputs = {name: tensors[name] for name in readable.inputs}
                outputs |= foresee_group(mapper, readable.group, inputs).outputs
            except ValueError as error:
                problems.append(str(error))
    return DryRun(outputs=outputs, unread=tuple(sorted(tensors.keys() - wanted)), problems=tuple(problems))


# ---- Text ------------------------------------------------------------------------------------------------------------


def format_inspection(inspection: Inspection, pattern: str = "*") -> str:
    """Write tables of files, tensors and totals, and all that is wrong.

    Args:
        inspection: What was found.
        pattern: Which tensors to show and count, as in file names: ``*.bias``.
    """
    shown = [info for info in inspection.tensors if fnmatch.fnmatchcase(info.name, pattern)]
    of_all = f"{len(shown)} of " if pattern != "*" else ""
    parts = [f"{inspection.directory}: {of_all}{counted(len(inspection.tensors), 'tensor')}"]
    if shown:
        parts += [_files_table(shown, inspection.files), _tensors_table(shown, inspection.files), _totals_table(shown)]
    if inspection.problems:
        problems = "\n".join(f"  {problem}" for problem in inspection.problems)
        parts.append(f"{counted(len(inspection.problems), 'problem')}:\n{problems}")
    else:
        parts.append("no problems")
    return "\n\n".join(parts)


def format_dry_run(mapper: ModelStateMapper, run: DryRun) -> str:
    """Write what a mapper reads and makes, and why it would fail."""
    rows = [
        (name, "", "known with data only", "")
        if output is None
        else (name, _dtype(output.dtype), _shape(output.shape), format_size(_num_bytes(output)))
        for name, output in sorted(run.outputs.items())
    ]
    parts = ["\n".join(["mapper:", *map(_printable, mapper.explain().splitlines())])]
    if rows:
        parts.append(_table(("makes", "dtype", "shape", "size"), rows))
    if run.unread:
        parts.append(f"not read: {counted(len(run.unread), 'tensor')}: {listed(run.unread)}")
    problems = "\n".join(f"  {problem}" for problem in run.problems)
    parts.append(f"the mapper does not fit:\n{problems}" if run.problems else "the mapper fits")
    return "\n\n".join(parts)


def _files_table(infos: Sequence[TensorInfo], files: Mapping[Path, str]) -> str:
    by_file: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in infos:
        by_file[files[info.file]].append(info)
    rows = [(file, str(len(held)), format_size(_total(held))) for file, held in sorted(by_file.items())]
    return _table(("file", "tensors", "size"), rows)


def _tensors_table(infos: Sequence[TensorInfo], files: Mapping[Path, str]) -> str:
    rows = [
        (info.name, _dtype(info.dtype), _shape(info.shape), format_size(info.num_bytes), files[info.file])
        for info in infos
    ]
    return _table(("tensor", "dtype", "shape", "size", "file"), rows)


def _totals_table(infos: Sequence[TensorInfo]) -> str:
    by_dtype: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in infos:
        by_dtype[_dtype(info.dtype)].append(info)
    groups = [*sorted(by_dtype.items()), *([("all", infos)] if len(by_dtype) > 1 else [])]
    rows = [
        (
            name,
            str(len(members)),
            f"{sum(math.prod(info.shape) for info in members):,}",
            format_size(_total(members)),
        )
        for name, members in groups
    ]
    return _table(("dtype", "tensors", "parameters", "size"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Write columns; those of numbers and sizes to the right."""
    rows = [tuple(map(_printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    to_right = [title in ("tensors", "parameters", "size") for title in header]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Write how many there are of something."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_size(num_bytes: int) -> str:
    """Write a size in decimal units, as disks and shard sizes are measured."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KB", "MB", "GB"):
        size /= 1000
        if size < 999.95:  # what is less does not show as 1000.0
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _printable(text: str) -> str:
    """Escape names: a file may give its tensors any, also one that tells a terminal what to do."""
    return text if text.isprintable() else repr(text)


def _total(infos: Iterable[TensorInfo]) -> int:
    return sum(info.num_bytes for info in infos)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _num_bytes(output: TensorPieces | torch.Tensor) -> int:
    return math.prod(output.shape) * output.dtype.itemsize
