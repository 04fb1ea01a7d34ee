"""Exports modules as model states, also where their parameters are sharded.

[Note: gathering in one order]
Gathering a tensor is a collective of the ranks that share it. All ranks go through the groups of the mapper sorted by name,
and through the inputs of each sorted by name, so that they meet in the same calls. The whole tensors of a group are on
every rank for a moment; one rank translates and writes them, the others let go.

Whatever goes wrong there on one rank alone, such as running out of memory, the others wait in that call. So this rank raises
at once, and makes no further calls, which they would take for the one they wait for.

Which rank that is follows from names and sizes: there are as many writers as files are needed, so that a small model
becomes one file, and each group goes to the writer with the fewest bytes so far.
"""

import dataclasses
import hashlib
import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d.core.participants import Participants
from d9d.core.placement import like_parameter, local_tensor
from d9d.model_state.io.export import Export, ExportOptions
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.shard_file import stored_bytes
from d9d.model_state.io.writer import check_mesh_dim
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, require_mapper, runnable_groups
from d9d.model_state.mapper.names import NearestNames, listed

__all__ = [
    "BackgroundExport",
    "save_model_state",
    "save_model_state_in_background",
    "save_model_state_pipeline_parallel",
    "save_model_state_pipeline_parallel_in_background",
]

_GROUPS_PER_AGREEMENT = 64
"""How far the ranks go on when one of them cannot write. Agreeing takes about a millisecond."""

_WORDS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes that all backends gather, by bytes. None has int16, and moving a float changes no bit of it."""


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
) -> None:
    """Export the parameters and persistent buffers of a module, plain or sharded. Blocks the host.

    All ranks of the process group must call it, with the same mapper and modules of the same names; in a job without
    processes to talk to, there is only one. To export from a single rank of a job, use `write_model_state_local` with
    ``module.state_dict().items()``.

    An error on one rank is raised on all, unless it strikes while others gather a tensor with this rank, as lack of memory
    may: it is raised here at once, and the others wait until this process ends, or for the time limit of the process group.

    Args:
        dest_dir: Directory of the model state, on a file system that all ranks share; it is created. Older weights in it
            are replaced once the new ones are complete, other files stay.
        mapper: Translates names of ``model.state_dict()`` to those on disk. It gets whole plain tensors on one rank, so it
            must not communicate. Of tied parameters, both names are there: it asks for those that the files are to have.
        model: The module.
        shard_size_gb: Most tensor bytes in a file, in units of 10^9; a larger tensor gets a file for itself. What fits
            into one file becomes ``model.safetensors``, without an index.
        show_progress: Show a bar of groups on the first rank.
        process_group: The ranks that call; all parameters are sharded among them at most. None: all of the job.
        dtype: What floating-point tensors are stored as. None: each as it is.
        manifest: Write SHA-256 digests beside the files, which loading compares. Reads every file once.

    Raises:
        ValueError: The module lacks inputs of the mapper, ranks have different modules, a tensor is produced twice or
            cannot be stored, an option makes no sense; on all ranks.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress; on all ranks.
        RuntimeError: Anything else that went wrong on a rank; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    ranks = _ranks_of(process_group)
    _save(dest_dir, mapper, [model], _Ranks(ranks, ranks), options, show_progress).finish()


def save_model_state_in_background(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    model: nn.Module,
    shard_size_gb: float = 4.0,
    show_progress: bool = True,
    *,
    process_group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    manifest: bool = False,
) -> BackgroundExport:
    """Start an export as `save_model_state`, and return when the tensors are copied to the host.

    The module may then be changed. Memory: a host copy of what this rank writes, until it is written.

    Args:
        dest_dir: As in `save_model_state`, as all others.
        mapper: See there.
        model: See there.
        shard_size_gb: See there.
        show_progress: See there.
        process_group: See there.
        dtype: See there.
        manifest: See there.

    Returns:
        The export, which all ranks must `wait` for.

    Raises:
        ValueError: As in `save_model_state`, as far as it is known by then; on all ranks.
        OSError: The directory cannot be used, or another export into it is in progress; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    ranks = _ranks_of(process_group)
    export = _save(dest_dir, mapper, [model], _Ranks(ranks, ranks), options, show_progress, in_background=True)
    return BackgroundExport(export)


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
) -> None:
    """Export the stages of a pipeline as one model state. Blocks the host.

    All ranks of the mesh must call it. Ranks that differ in other mesh dimensions only hold the same stages, as replicas or
    in shards, and share the writing.

    Args:
        dest_dir: As in `save_model_state`.
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

    Raises:
        ValueError: As in `save_model_state`; or two stages have different tensors of one name, or the mesh has no such
            dimension; on all ranks.
        OSError: Naming the path that cannot be written; or another export into the directory is in progress; on all ranks.
        RuntimeError: Anything else that went wrong on a rank; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    ranks = _ranks_of_mesh(device_mesh, pipeline_dim_name)
    _save(dest_dir, mapper, models, ranks, options, show_progress, position).finish()


def save_model_state_pipeline_parallel_in_background(
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
) -> BackgroundExport:
    """Start an export as `save_model_state_pipeline_parallel`, and return when the tensors are copied to the host.

    The modules may then be changed. Memory: a host copy of what this rank writes, until it is written.

    Args:
        dest_dir: As in `save_model_state_pipeline_parallel`, as all others.
        mapper: See there.
        device_mesh: See there.
        pipeline_dim_name: See there.
        models: See there.
        shard_size_gb: See there.
        show_progress: See there.
        position: See there.
        dtype: See there.
        manifest: See there.

    Returns:
        The export, which all ranks must `wait` for.

    Raises:
        ValueError: As in `save_model_state_pipeline_parallel`, as far as it is known by then; on all ranks.
        OSError: The directory cannot be used, or another export into it is in progress; on all ranks.
    """
    options = ExportOptions(shard_size_gb=shard_size_gb, dtype=dtype, manifest=manifest)
    ranks = _ranks_of_mesh(device_mesh, pipeline_dim_name)
    export = _save(dest_dir, mapper, models, ranks, options, show_progress, position, in_background=True)
    return BackgroundExport(export)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ranks:
    everyone: Participants
    """All ranks that export."""
    peers: Participants
    """Those with the same modules as this one."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be written, in the order of all peers. See [Note: gathering in one order]."""

    state: dict[str, torch.Tensor]
    groups: list[StateGroup]
    writers: list[int]
    """Peer that writes each group."""

    def outputs_of(self, peer: int) -> list[str]:
        return [
            name
            for group, writer in zip(self.groups, self.writers, strict=True)
            if writer == peer
            for name in group.outputs
        ]


def _ranks_of(process_group: dist.ProcessGroup | None) -> Participants:
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    return Participants() if process_group is None else Participants([process_group])


def _ranks_of_mesh(device_mesh: DeviceMesh, pipeline_dim_name: str) -> _Ranks:
    check_mesh_dim(device_mesh, pipeline_dim_name)
    return _Ranks(
        everyone=Participants.of_mesh(device_mesh), peers=Participants.of_mesh(device_mesh, without=pipeline_dim_name)
    )


@torch.no_grad()
def _save(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    models: Sequence[nn.Module],
    ranks: _Ranks,
    options: ExportOptions,
    show_progress: bool,
    position: int | None = None,
    *,
    in_background: bool = False,
) -> Export:
    """Write, or hand to a thread, everything that is this rank's to write. A collective of all ranks."""
    with ranks.everyone.failing_together():
        options.check()
        require_mapper(mapper)
        plan = _plan(mapper, _merged_state(models), ranks.peers.size, options)
    _check_same_plan(plan, ranks)
    outputs = plan.outputs_of(ranks.peers.rank)
    export = Export(Path(dest_dir), ranks.everyone, options, outputs, in_background=in_background)
    is_first = ranks.everyone.rank == 0
    bar = progress_bar(len(plan.groups), "group", "writing", show_progress, position, is_first=is_first)
    try:
        with bar:
            for index in range(len(plan.groups)):
                _gather_and_write(plan, index, mapper, export, ranks.peers)
                bar.update()
                # See [Note: a rank that cannot write].
                if index % _GROUPS_PER_AGREEMENT == 0 and any(ranks.peers.gather(export.has_failed)):
                    break
    except BaseException:
        # See [Note: gathering in one order]. Errors of the mapper and of files do not come here.
        export.abort()
        raise
    return export


def _gather_and_write(plan: _Plan, index: int, mapper: ModelStateMapper, export: Export, peers: Participants) -> None:
    """Gather the inputs of a group, and write its outputs if they are this rank's. A collective of the peers."""
    group = plan.groups[index]
    inputs = {name: _whole(plan.state[name]) for name in sorted(group.inputs) if name in plan.state}
    if plan.writers[index] != peers.rank or export.has_failed:
        return
    try:
        outputs = mapper.apply(inputs)
    except Exception as error:  # noqa: BLE001  # raised by `Export.finish`, on all ranks
        export.fail(error)
    else:
        export.write(outputs, group.outputs)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor. A collective of the ranks that share it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.full_tensor()
    # Backends do not take all dtypes (gloo has no float8), and nothing is computed: words of the same size will do.
    words = like_parameter(local_tensor(tensor).view(_WORDS[tensor.itemsize]), tensor)
    return words.full_tensor().view(tensor.dtype) if isinstance(words, DTensor) else words


def _merged_state(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors of all modules by name; what else a state dict may hold is left out."""
    merged: dict[str, torch.Tensor] = {}
    different: set[str] = set()
    for model in models:
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor) and not _is_same(merged.setdefault(name, value), value):
                different.add(name)
    if different:
        raise ValueError(
            f"{len(different)} names stand for different tensors in the stages of this rank: {listed(different)}. Give "
            f"each stage names of its own, such as the numbers that its layers have in the whole model."
        )
    return merged


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first is second:
        return True
    # State dicts hold new objects over the memory of the parameters.
    first_local, second_local = local_tensor(first), local_tensor(second)
    return (
        (first.shape, first.dtype) == (second.shape, second.dtype)
        and first_local.stride() == second_local.stride()
        and first_local.data_ptr() == second_local.data_ptr()
        and first_local.untyped_storage().data_ptr() == second_local.untyped_storage().data_ptr()
    )


def _plan(mapper: ModelStateMapper, state: dict[str, torch.Tensor], num_peers: int, options: ExportOptions) -> _Plan:
    groups, lacking = runnable_groups(mapper, state.keys())
    wanted = {name for group in groups for name in group.inputs}
    missing = {name for names in lacking.values() for name in names}
    if missing:
        num_wanted = len({name for group in mapper.state_dependency_groups() for name in group.inputs})
        raise ValueError(
            f"the model lacks {len(missing)} of {num_wanted} tensors that the mapper reads: "
            f"{NearestNames(state.keys()).described(missing)}. It has the names of model.state_dict()."
        )
    sizes = [
        sum(stored_bytes(state[name], options.dtype) for name in group.inputs if name in state) for group in groups
    ]
    num_writers = min(num_peers, -(-sum(sizes) // options.shard_bytes) or 1)
    loads = [(0, writer) for writer in range(num_writers)]
    writers: list[int] = []
    for size in sizes:
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + size, writer))
        writers.append(writer)
    return _Plan({name: state[name] for name in sorted(wanted) if name in state}, groups, writers)


def _check_same_plan(plan: _Plan, ranks: _Ranks) -> None:
    """Refuse, on all ranks, if ranks that hold the same modules would gather different tensors."""
    lines = [_description(name, tensor) for name, tensor in plan.state.items()]
    lines += [f"{', '.join(sorted(group.inputs))} -> {', '.join(sorted(group.outputs))}" for group in plan.groups]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    with ranks.everyone.failing_together():
        # Lines travel only where there is something to explain.
        if len(set(ranks.peers.gather(digest))) > 1:
            by_peer = ranks.peers.gather(set(lines))
            different = set[str]().union(*by_peer) - by_peer[0].intersection(*by_peer)
            raise ValueError(
                f"ranks that hold the same modules would export different tensors, so they cannot gather them together. "
                f"Not on all of them: {listed(different)}. Give all of them the same mapper and the same modules."
            )


def _description(name: str, tensor: torch.Tensor) -> str:
    layout = "plain"
    if isinstance(tensor, DTensor):
        # On the meta device, which one rank may have forgotten to leave, there is nothing to gather.
        layout = f"over {tensor.device_mesh.shape} as {tensor.placements} on {tensor.device.type}"
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {layout}"
