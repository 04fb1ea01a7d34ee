"""Exports modules as model states, also where their parameters are sharded."""

from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.participants import Participants
from d9d.model_state.io.export import Export, ExportOptions
from d9d.model_state.io.module_export import ExportRanks, start_export
from d9d.model_state.io.writer import check_mesh_dim
from d9d.model_state.mapper.base import ModelStateMapper

__all__ = [
    "BackgroundExport",
    "save_model_state",
    "save_model_state_pipeline_parallel",
]


@final
class BackgroundExport:
    """An export whose files a thread still writes. It is a model state when `wait` has returned, and nothing before.

    Until then, no other export into the directory can begin.
    """

    def __init__(self, export: Export) -> None:
        self._export: Export | None = export

    def wait(self) -> None:
        """Wait for the files of all ranks, and make a model state of them. Further calls do nothing.

        All ranks must call it, at the same point of their other collectives; blocks the host.

        Raises:
            OSError: Naming the path that could not be written; on all ranks.
            ValueError: A tensor could not be written; on all ranks.
            RuntimeError: Anything else that went wrong on a rank; on all ranks.
        """
        export, self._export = self._export, None
        if export is not None:
            export.finish()

    def abandon(self) -> None:
        """Give up what is not complete: remove this rank's files. No communication, for a job that ends by an error."""
        export, self._export = self._export, None
        if export is not None:
            export.abort()


def save_model_state(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    model: nn.Module,
    shard_size_gb: float = 4.0,
    show_progress: bool = True,
    *,
    process_group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    manifest: bool = False,
    in_background: bool = False,
) -> BackgroundExport | None:
    """Export the parameters and persistent buffers of a module, plain or sharded. Blocks the host.

    All ranks of the process group must call it, with the same mapper and modules of the same names; in a job without
    processes to talk to, there is only one. To export from a single rank of a job, use `write_model_state_local` with
    ``module.state_dict().items()``.

    The files do not depend on the number of ranks. Memory: chunks of 4 MiB, and one group of the mapper where it is gathered, see
    [Note: who writes what].

    An error on one rank is raised on all, unless it strikes while others gather a tensor with this rank, as lack of memory
    may: it is raised here at once, and the others wait until this process ends, or for the time limit of the process group.

    Args:
        dest_dir: Directory of the model state; it is created. Older weights in it are replaced once the new ones are
            complete, other files stay. Ranks that do not see it, as it is on a disk of the first rank's machine, send what
            they hold to those that do.
        mapper: Translates names of ``model.state_dict()`` to those on disk. Where it has a `trace`, ranks write what they
            hold; elsewhere it gets whole plain tensors on one rank, so it must not communicate. Of tied parameters, both names are there: it asks for those that the files are to have.
        model: The module.
        shard_size_gb: Most tensor bytes in a file, in units of 10^9; a larger tensor gets a file for itself. What fits
            into one file becomes ``model.safetensors``, without an index.
        show_progress: Show a bar of groups on the first rank.
        process_group: The ranks that call; all parameters are sharded among them at most. None: all of the job.
        dtype: What floating-point tensors are stored as. None: each as it is.
        manifest: Write SHA-256 digests beside the files, which loading compares. Reads every file once.
        in_background: Return when this rank's tensors are copied to the host, after which the module may change, and let a
            thread write them. Memory: that copy, until it is written.

    Returns:
        With `in_background` the export, which all ranks must `wait` for.

    Raises:
        ValueError: The module lacks inputs of the mapper, ranks have different modules, a tensor is produced twice or
            cannot be stored, an option makes no sense; on all ranks.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress; on all ranks.
        RuntimeError: Anything else that went wrong on a rank; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    ranks = _ranks_of(process_group)
    started = start_export(dest_dir, mapper, [model], ranks, options, show_progress, in_background=in_background)
    return _started(started, in_background)


def save_model_state_pipeline_parallel(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    device_mesh: DeviceMesh,
    pipeline_dim_name: str,
    models: list[nn.Module],
    shard_size_gb: float = 4.0,
    show_progress: bool = True,
    position: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    manifest: bool = False,
    in_background: bool = False,
) -> BackgroundExport | None:
    """Export the stages of a pipeline as one model state. Blocks the host.

    All ranks of the mesh must call it. Ranks that differ in other mesh dimensions only hold the same stages, as replicas or
    in shards, and share the writing.

    Args:
        dest_dir: As in `save_model_state`; the first of the ranks that hold the same stages must see it.
        mapper: Of the stages of this rank: no two pipeline ranks may produce the same name. As in `save_model_state`.
        device_mesh: All ranks that call this. Where other dimensions exist, not the pipeline's slice alone: each
            pipeline would write the same files.
        pipeline_dim_name: The mesh dimension of the pipeline.
        models: Stages of this rank. A name that two of them have must stand for the same tensor.
        shard_size_gb: As in `save_model_state`; each pipeline rank writes files of its own.
        show_progress: Show a bar of the first rank's groups.
        position: Line of the bar, among several.
        dtype: As in `save_model_state`.
        manifest: As in `save_model_state`.
        in_background: As in `save_model_state`.

    Returns:
        As `save_model_state`.

    Raises:
        ValueError: As in `save_model_state`; or two stages have different tensors of one name, or the mesh has no such
            dimension; on all ranks.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress; on all ranks.
        RuntimeError: Anything else that went wrong on a rank; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    ranks = _ranks_of_mesh(device_mesh, pipeline_dim_name)
    started = start_export(
        dest_dir, mapper, models, ranks, options, show_progress, position, in_background=in_background
    )
    return _started(started, in_background)


def _started(export: Export, in_background: bool) -> BackgroundExport | None:
    if in_background:
        return BackgroundExport(export)
    export.finish()
    return None


def _ranks_of(process_group: dist.ProcessGroup | None) -> ExportRanks:
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    ranks = Participants() if process_group is None else Participants([process_group])
    return ExportRanks(everyone=ranks, peers=ranks)


def _ranks_of_mesh(device_mesh: DeviceMesh, pipeline_dim_name: str) -> ExportRanks:
    check_mesh_dim(device_mesh, pipeline_dim_name)
    return ExportRanks(
        everyone=Participants.of_mesh(device_mesh), peers=Participants.of_mesh(device_mesh, without=pipeline_dim_name)
    )
