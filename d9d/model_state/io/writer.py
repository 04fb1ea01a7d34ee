"""Streams tensors through a state mapper into a model state: safetensors files with an index.

A group of the mapper is translated and written as soon as its inputs have come, and they are let go. Memory: the inputs that
wait for others, one group, and what `ShardFile` says. How files are replaced: [Note: what a stopped export leaves].
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.participants import Participants
from d9d.model_state.io.export import Export, ExportOptions
from d9d.model_state.io.planning import without_garbage_collection
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.streamed_files import StreamedFiles
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, ordered_groups, runnable_groups
from d9d.model_state.mapper.check import check_outputs
from d9d.model_state.mapper.names import NearestNames

__all__ = ["write_model_state_distributed", "write_model_state_local", "write_model_state_pipeline_parallel"]


def write_model_state_local(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    state_generator: Iterable[tuple[str, torch.Tensor]],
    shard_size_gb: float = 4.0,
    show_progress: bool = True,
    *,
    dtype: torch.dtype | None = None,
    manifest: bool = False,
) -> None:
    """Write a model state from one process. No communication.

    Args:
        dest_dir: Directory of the model state; it is created. Older weights in it are replaced once the new ones are
            complete, other files stay.
        mapper: Translates to the layout on disk.
        state_generator: Names and tensors, each name once, in any order. What the mapper does not want is skipped.
        shard_size_gb: Most tensor bytes in a file, in units of 10^9; a larger tensor gets a file for itself. What fits
            into one file becomes ``model.safetensors``, without an index.
        show_progress: Show a bar of groups.
        dtype: What floating-point tensors are stored as. None: each as it is.
        manifest: Write SHA-256 digests beside the files, which loading compares. Reads every file once.

    Raises:
        ValueError: Inputs are missing or come twice, an output is produced twice or cannot be stored, an option makes no
            sense.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    _write(dest_dir, mapper, state_generator, Participants(), options, show_progress)


def write_model_state_distributed(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    state_generator: Iterable[tuple[str, torch.Tensor]],
    process_group: dist.ProcessGroup,
    shard_size_gb: float = 4.0,
    show_progress: bool = True,
    position: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    manifest: bool = False,
) -> None:
    """Write one model state from all ranks of a group, each of which has a part of the outputs.

    All ranks of the group must call it; blocks the host. An error on one rank is raised on all, unless it strikes while
    others wait for that rank inside their generator or mapper: these wait for the time limit of the process group.

    Args:
        dest_dir: As in `write_model_state_local`, on a file system that all ranks share.
        mapper: Of this rank. No two ranks may produce the same name: see `ModelStateMapperShard`.
        state_generator: What the mapper of this rank needs, as in `write_model_state_local`.
        process_group: The ranks. Its first one gives the files their names.
        shard_size_gb: As in `write_model_state_local`; each rank writes files of its own.
        show_progress: Show a bar of the first rank's groups.
        position: Line of the bar, among several.
        dtype: As in `write_model_state_local`.
        manifest: As in `write_model_state_local`.

    Raises:
        ValueError: As in `write_model_state_local`, or two ranks have produced one name; on all ranks.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress; on all ranks.
        RuntimeError: Anything else that went wrong on a rank; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    _write(dest_dir, mapper, state_generator, Participants([process_group]), options, show_progress, position)


def write_model_state_pipeline_parallel(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    state_generator: Iterable[tuple[str, torch.Tensor]],
    device_mesh: DeviceMesh,
    pipeline_dim_name: str,
    shard_size_gb: float = 4.0,
    show_progress: bool = True,
    position: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    manifest: bool = False,
) -> None:
    """Write one model state from the ranks of a pipeline, each of which has some stages.

    Ranks that differ in other mesh dimensions only hold the same stages: the first of them writes, and all read their
    generator and run their mapper, so that these may gather shards. All ranks of the mesh must call it; blocks the host.

    Args:
        dest_dir: As in `write_model_state_local`, on a file system that all ranks share.
        mapper: Of the stages of this rank.
        state_generator: What that mapper needs, as in `write_model_state_local`.
        device_mesh: All ranks that call this. Where other dimensions exist, not the pipeline's slice alone: each
            pipeline would write the same files.
        pipeline_dim_name: The mesh dimension of the pipeline.
        shard_size_gb: As in `write_model_state_local`; each pipeline rank writes files of its own.
        show_progress: Show a bar of the first rank's groups.
        position: Line of the bar, among several.
        dtype: As in `write_model_state_local`.
        manifest: As in `write_model_state_local`.

    Raises:
        ValueError: As in `write_model_state_distributed`, or the mesh has no such dimension; on all ranks.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress; on all ranks.
        RuntimeError: Anything else that went wrong on a rank; on all ranks.
    """
    check_mesh_dim(device_mesh, pipeline_dim_name)
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    participants = Participants.of_mesh(device_mesh)
    is_writer = Participants.of_mesh(device_mesh, without=pipeline_dim_name).rank == 0
    _write(dest_dir, mapper, state_generator, participants, options, show_progress, position, is_writer=is_writer)


def check_mesh_dim(device_mesh: DeviceMesh, name: str) -> None:
    """Raise ValueError if a mesh has no dimension of a name."""
    names = device_mesh.mesh_dim_names or ()
    if name not in names:
        raise ValueError(f"the mesh has no dimension {name!r}. It has {', '.join(names) or 'no names'}.")


def _write(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    state_generator: Iterable[tuple[str, torch.Tensor]],
    participants: Participants,
    options: ExportOptions,
    show_progress: bool,
    position: int | None = None,
    *,
    is_writer: bool = True,
) -> None:
    with participants.failing_together(), without_garbage_collection():
        waiting = _WaitingGroups(mapper)
    export = Export(Path(dest_dir), participants, options)
    names = waiting.output_names if is_writer else ()
    files = StreamedFiles(Path(dest_dir), participants.rank, export.token, options, names)
    export.begin(files)
    is_first = participants.rank == 0
    bar = progress_bar(waiting.num_groups, "group", "writing", show_progress, position, is_first=is_first)
    try:
        with export.noting_errors(), torch.no_grad(), bar:
            for group, inputs in waiting.complete(state_generator):
                # Also on ranks that do not write, or can no longer: it may gather.
                outputs = mapper.apply(inputs)
                if is_writer and not export.has_failed:
                    with export.noting_errors():
                        check_outputs(mapper, group, outputs)
                        files.write(outputs)
                del inputs, outputs
                bar.update()
    except BaseException:
        export.abort()
        raise
    export.finish()


@final
class _WaitingGroups:
    """Collects inputs until a group has all of them."""

    def __init__(self, mapper: ModelStateMapper) -> None:
        self._mapper = mapper
        self._groups = ordered_groups(mapper.state_dependency_groups())
        self._group_of: dict[str, int] = {}
        for index, group in enumerate(self._groups):
            for name in group.inputs:
                if self._group_of.setdefault(name, index) != index:
                    raise ValueError(f"the mapper reads '{name}' in two groups. Each tensor may be an input of one.")
        self._inputs: dict[int, dict[str, torch.Tensor]] = {index: {} for index in range(len(self._groups))}
        self._seen: set[str] = set()
        self._skipped: set[str] = set()

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def output_names(self) -> list[str]:
        return [name for group in self._groups for name in group.outputs]

    def complete(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[StateGroup, dict[str, torch.Tensor]]]:
        """Yield each group with its inputs as soon as they are there, and those with optional inputs missing at the end.

        Raises:
            ValueError: A name comes twice; or, at the end, groups lack inputs.
        """
        for name, tensor in tensors:
            index = self._group_of.get(name)
            if index is None:
                self._skipped.add(name)
                continue
            if name in self._seen:
                raise ValueError(f"'{name}' came twice. The state to write must have each name once.")
            self._seen.add(name)
            self._inputs[index][name] = tensor
            del tensor
            if len(self._inputs[index]) == len(self._groups[index].inputs):
                yield self._groups[index], self._inputs.pop(index)
        yield from self._without_optional_inputs()

    def _without_optional_inputs(self) -> Iterator[tuple[StateGroup, dict[str, torch.Tensor]]]:
        runnable, lacking = runnable_groups(self._mapper, self._seen)
        missing = {name for names in lacking.values() for name in names}
        if missing:
            raise ValueError(
                f"{len(lacking)} of {len(self._groups)} groups of the mapper did not get all inputs. Missing: "
                f"{NearestNames(self._skipped).described(missing)}. The state must have every input of the mapper."
            )
        wanted = set(runnable)
        for index in list(self._inputs):
            if self._groups[index] in wanted:
                yield self._groups[index], self._inputs.pop(index)
