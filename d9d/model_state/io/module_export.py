"""An export of modules from the ranks that hold them.

[Note: an export in one order]
All ranks find the same plan: which tensors there are, in which files, and who writes what ([Note: who writes what]). Each first
writes what it holds, without asking the others. Then come the groups that must be gathered, sorted by name, and their inputs
sorted by name, so that the ranks meet in the same calls.

Whatever goes wrong there on one rank alone, such as running out of memory, the others wait in that call. So this rank raises
at once, and makes no further calls, which they would take for the one they wait for.
"""

import dataclasses
import hashlib
import operator
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from d9d.core.participants import Participants
from d9d.core.placement import local_tensor
from d9d.model_state.io.boxes import LocalBox, local_boxes
from d9d.model_state.io.export import Export, ExportOptions
from d9d.model_state.io.export_directory import temporary_name
from d9d.model_state.io.export_plan import Assignment, ExportGroup, Holdings, assign
from d9d.model_state.io.file_header import check_name
from d9d.model_state.io.file_layout import StoredTensor, lay_out
from d9d.model_state.io.gathering import gather_to
from d9d.model_state.io.laid_out_files import LaidOutFiles
from d9d.model_state.io.planning import without_garbage_collection
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.reader import apply_group, foresee_group
from d9d.model_state.io.stored_values import check_plain, check_writable_dtype, stored_dtype
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, require_mapper, runnable_groups
from d9d.model_state.mapper.names import NearestNames, listed
from d9d.model_state.mapper.pieces import Box, TensorPieces

__all__ = ["ExportRanks", "start_export"]

_GROUPS_PER_AGREEMENT = 64
"""How many groups are gathered for a rank that cannot write. Agreeing takes about a millisecond."""


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Says which running kernel this is, also in containers, which share it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportRanks:
    """The ranks of an export.

    Attributes:
        everyone: All that export together.
        peers: Those with the same modules as this one.
    """

    everyone: Participants
    peers: Participants


@torch.no_grad()
def start_export(
    dest_dir: Path | str,
    mapper: ModelStateMapper,
    models: Sequence[nn.Module],
    ranks: ExportRanks,
    options: ExportOptions,
    show_progress: bool,
    position: int | None = None,
    *,
    in_background: bool = False,
) -> Export:
    """Write, or hand to a thread, everything that is this rank's to write. A collective of all ranks.

    Args:
        dest_dir: Where the model state goes.
        mapper: Of the modules of this rank.
        models: The modules, whose names stand for the same tensors.
        ranks: Who exports.
        options: How tensors are stored.
        show_progress: Whether the first rank shows a bar.
        position: Line of the bar, among several.
        in_background: Whether a thread writes.

    Returns:
        The export, which all ranks must `finish`.
    """
    with ranks.everyone.failing_together():
        options.check()
        require_mapper(mapper)
        state = _merged_state(models)
        groups = _runnable(mapper, state)
        inputs = {name for group in groups for name in group.inputs}
        state = {name: state[name] for name in sorted(inputs & state.keys())}
    _check_same_plan(state, groups, ranks)
    with without_garbage_collection():
        source = _PeerState(state, ranks.peers)
    foreseen = _foresee(mapper, groups, source, ranks, options)
    layouts = lay_out((tensor for group in foreseen for tensor in group.outputs), options.shard_bytes)
    export = Export(Path(dest_dir), ranks.everyone, options)
    try:
        first = ranks.peers.gather(ranks.everyone.rank)[0]
        paths = [Path(dest_dir) / temporary_name(first, number, export.token) for number in range(len(layouts))]
        files = LaidOutFiles(paths, layouts, options, ranks.peers.rank, first, in_background=in_background)
        export.begin(files)
        with ranks.everyone.failing_together():
            if ranks.peers.rank == 0:
                files.create()
        machines = ranks.peers.gather(_machine(paths))
        files.share_reports([rank for rank, machine in enumerate(machines) if machine is not None])
        with without_garbage_collection():
            assignment = assign(foreseen, state, layouts, source.holdings, machines)
        is_first = ranks.everyone.rank == 0
        with progress_bar(len(groups), "group", "writing", show_progress, position, is_first=is_first) as bar:
            with export.noting_errors():
                _write_own(state, assignment, ranks.peers.rank, files, bar)
            _gather_and_write(source, assignment, mapper, export, files, bar)
    except BaseException:
        # See [Note: an export in one order]. Errors of the mapper and of files do not come here.
        export.abort()
        raise
    return export


@final
class _PeerState:
    """The tensors that peers export, and what each of them holds. All peers create it: a collective."""

    def __init__(self, state: Mapping[str, torch.Tensor], peers: Participants) -> None:
        self.tensors = state
        self.peers = peers
        self.holdings = peers.gather(_holdings(state.values()))
        self._positions = {name: position for position, name in enumerate(state)}
        self._peer_of_rank = {holding.rank: peer for peer, holding in enumerate(self.holdings)}

    def inputs_of(self, group: StateGroup) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in sorted(group.inputs) if name in self.tensors}

    def gather(self, group: StateGroup, peer: int) -> dict[str, torch.Tensor]:
        """Return the whole inputs of a group on a peer. A collective of the peers; others get parts of it."""
        gathered = {
            name: gather_to(tensor, self.holdings[peer].rank, self._boxes_of(name))
            for name, tensor in self.inputs_of(group).items()
        }
        return {name: tensor for name, tensor in gathered.items() if tensor is not None}

    def _boxes_of(self, name: str) -> Callable[[int], Sequence[LocalBox] | None]:
        position = self._positions[name]

        def boxes_of(rank: int) -> Sequence[LocalBox] | None:
            peer = self._peer_of_rank.get(rank)
            return None if peer is None else self.holdings[peer].boxes[self.holdings[peer].indices[position]]

        return boxes_of


def _foresee(
    mapper: ModelStateMapper,
    groups: Sequence[StateGroup],
    source: _PeerState,
    ranks: ExportRanks,
    options: ExportOptions,
) -> list[ExportGroup]:
    """Find out what each group makes. A collective of all ranks.

    Mappers that look at values are run for it on the first peer, and once more when their outputs are written.
    """
    foreseen: list[ExportGroup] = []
    unknown: list[int] = []
    made: dict[int, list[StoredTensor]] = {}
    with ranks.everyone.failing_together(), without_garbage_collection():
        for name, tensor in source.tensors.items():
            check_plain(name, local_tensor(tensor))
        for number, group in enumerate(groups):
            inputs = source.inputs_of(group)
            known = foresee_group(mapper, group, inputs)
            foreseen.append(ExportGroup(group, tuple(inputs), _stored(known.outputs, options), known.pieces))
            if not known.outputs:
                unknown.append(number)
    error: Exception | None = None
    for number in unknown:
        inputs = source.gather(groups[number], 0)
        if source.peers.rank == 0 and error is None:
            try:
                made[number] = list(_stored(apply_group(mapper, groups[number], inputs), options))
            except Exception as caught:  # noqa: BLE001  # raised below, on all ranks
                error = caught
    ranks.everyone.raise_together(error)
    for number, outputs in (source.peers.gather(made)[0] if unknown else {}).items():
        foreseen[number] = dataclasses.replace(foreseen[number], outputs=tuple(outputs))
    with ranks.everyone.failing_together():
        _check_once(foreseen)
    return foreseen


def _stored(outputs: "Mapping[str, TensorPieces | torch.Tensor]", options: ExportOptions) -> tuple[StoredTensor, ...]:
    """Return how outputs are stored.

    Raises:
        ValueError: If one cannot be.
    """
    stored: list[StoredTensor] = []
    for name in sorted(outputs):
        output = outputs[name]
        check_name(name)
        if isinstance(output, DTensor):
            check_plain(name, output)
        dtype = stored_dtype(output.dtype, options.dtype)
        check_writable_dtype(dtype, name)
        stored.append(StoredTensor(name, tuple(output.shape), dtype))
    return tuple(stored)


def _check_once(groups: Sequence[ExportGroup]) -> None:
    seen: set[str] = set()
    for name in (tensor.name for group in groups for tensor in group.outputs):
        if name in seen:
            raise ValueError(f"the mapper produces {name} twice. Each name in a model state stands for one tensor.")
        seen.add(name)


def _holdings(tensors: Iterable[torch.Tensor]) -> Holdings:
    """Return what this rank holds of tensors."""
    numbers: dict[tuple[LocalBox, ...] | None, int] = {}
    indices: list[int] = []
    for tensor in tensors:
        try:
            boxes = local_boxes(tensor)
        except NotImplementedError:
            boxes = None
        indices.append(numbers.setdefault(boxes, len(numbers)))
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Holdings(rank, tuple(numbers), indices)


def _machine(paths: Sequence[Path]) -> str | None:
    """Return what ranks have in common that write to the same memory of files; None if this one does not see them."""
    try:
        files = [path.stat() for path in paths]
    except FileNotFoundError:
        return None
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = platform.node()
    return " ".join([machine, *(f"{file.st_dev}:{file.st_ino}" for file in files[:1])])


def _write_own(
    state: Mapping[str, torch.Tensor],
    assignment: Assignment,
    rank: int,
    files: LaidOutFiles,
    bar: "tqdm[NoReturn]",
) -> None:
    """Write what this rank holds of the groups that need not be gathered. No communication."""
    groups, num_ranks = assignment.direct, len(assignment.loads)
    # Ranks begin at different files, as one at a time writes to a file.
    first = len(groups) * rank // num_ranks
    for group in (*groups[first:], *groups[:first]):
        for name, tensor in (group.pieces or {}).items():
            for piece in tensor.pieces:
                if piece.source is None or rank not in assignment.owners[piece.source]:
                    continue
                local = local_tensor(state[piece.source])
                for part in local_boxes(state[piece.source]):
                    own = piece.within_source(part.box)
                    if own is not None:
                        start = tuple(map(operator.sub, own.source_box.start, part.box.start))
                        start = tuple(map(operator.add, start, part.local.start))
                        values = local[Box(start, own.source_box.shape).slices]
                        files.write(name, own.box, own.arranged(values), own.dtypes)
        bar.update()


def _gather_and_write(
    source: _PeerState,
    assignment: Assignment,
    mapper: ModelStateMapper,
    export: Export,
    files: LaidOutFiles,
    bar: "tqdm[NoReturn]",
) -> None:
    """Gather the other groups, and write those that are this rank's. A collective of the peers."""
    for number, (group, writer) in enumerate(assignment.gathered):
        inputs = source.gather(group.group, writer)
        if writer == source.peers.rank and not export.has_failed:
            with export.noting_errors():
                outputs = apply_group(mapper, group.group, inputs)
                for stored in group.outputs:
                    files.write_whole(stored.name, outputs.pop(stored.name))
        del inputs
        bar.update()
        # See [Note: a rank that cannot write].
        if number % _GROUPS_PER_AGREEMENT == 0 and any(source.peers.gather(export.has_failed)):
            break


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


def _runnable(mapper: ModelStateMapper, state: Mapping[str, torch.Tensor]) -> list[StateGroup]:
    groups, lacking = runnable_groups(mapper, state.keys())
    missing = {name for names in lacking.values() for name in names}
    if missing:
        num_wanted = len({name for group in mapper.state_dependency_groups() for name in group.inputs})
        raise ValueError(
            f"the model lacks {len(missing)} of {num_wanted} tensors that the mapper reads: "
            f"{NearestNames(state.keys()).described(missing)}. It has the names of model.state_dict()."
        )
    return groups


def _check_same_plan(state: Mapping[str, torch.Tensor], groups: Sequence[StateGroup], ranks: ExportRanks) -> None:
    """Refuse, on all ranks, if ranks that hold the same modules would gather different tensors."""
    lines = [_description(name, tensor) for name, tensor in state.items()]
    lines += [f"{', '.join(sorted(group.inputs))} -> {', '.join(sorted(group.outputs))}" for group in groups]
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
