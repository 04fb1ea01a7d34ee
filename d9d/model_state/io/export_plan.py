"""Decides which rank writes which parts of an export. A function of plain values, so that all ranks find the same.

[Note: who writes what]
Most tensors need not travel: a mapper that can be traced tells which part of which output each shard becomes, and its holder
writes it there. Of ranks that hold the same, one writes, the one with the fewest bytes so far. All parts of a file come from
one machine, see [Note: several ranks write one file]; several machines get files in turn.

A group is gathered to one rank, which runs the mapper on whole tensors, where that does not work: the mapper cannot be traced,
the ranks of the machine do not hold all of it between them, or its parts would be scattered over the file in so small pieces
that sending them is faster.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import final

from d9d.model_state.io.boxes import LocalBox, num_elements
from d9d.model_state.io.file_layout import FileLayout, StoredTensor
from d9d.model_state.io.reader import Described
from d9d.model_state.mapper.base import StateGroup
from d9d.model_state.mapper.pieces import Piece, TensorPieces

__all__ = ["Assignment", "ExportGroup", "Holdings", "assign"]

_PIECE_S = 30e-6
_RUN_S = 1e-6
"""What a piece takes to work out, and a write of a few bytes to make."""

_GATHERED_BYTES_PER_S = 300e6
"""How fast shards are gathered and written, at least."""

_SHORT_S = 2e-3
"""What a gather takes in any case."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExportGroup:
    """A group of the mapper, and what it makes.

    Attributes:
        group: The group.
        inputs: Those of its inputs that there are, sorted.
        outputs: What it makes, sorted by name.
        pieces: What the outputs are made of; None if the mapper cannot tell.
    """

    group: StateGroup
    inputs: tuple[str, ...]
    outputs: tuple[StoredTensor, ...]
    pieces: Mapping[str, TensorPieces] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What a rank holds of each tensor.

    Attributes:
        rank: Of the rank in the job.
        boxes: What ranks hold of tensors, each once; None for what is no box, such as a part of a sum.
        indices: Of the tensors' boxes, in the order of the tensors.
    """

    rank: int
    boxes: Sequence[tuple[LocalBox, ...] | None]
    indices: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """What is to be done, and who does it.

    Attributes:
        direct: Groups whose holders write their own parts.
        owners: For each input of these, the ranks that write what they hold of it.
        gathered: Groups that one rank runs and writes, and that rank.
        loads: About how many bytes each rank writes.
    """

    direct: Sequence[ExportGroup]
    owners: Mapping[str, frozenset[int]]
    gathered: Sequence[tuple[ExportGroup, int]]
    loads: Sequence[int]


def assign(
    groups: Sequence[ExportGroup],
    inputs: Mapping[str, Described],
    layouts: Sequence[FileLayout],
    holdings: Sequence[Holdings],
    machines: Sequence[str | None],
) -> Assignment:
    """Decide who writes what. See [Note: who writes what].

    Args:
        groups: In the order of the files.
        inputs: Of all groups, in the order of the holdings.
        layouts: The files.
        holdings: Of all ranks that export these groups.
        machines: Whose memory of files each of them shares; None for one that does not see the files. The first does.
    """
    members: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        if machine is not None:
            members.setdefault(machine, []).append(rank)
    of_groups = _machines_of(groups, layouts, list(members))
    loads = [0] * len(holdings)
    holders = {machine: _Holders(own, holdings, inputs) for machine, own in members.items()}
    direct: list[ExportGroup] = []
    owners: dict[str, frozenset[int]] = {}
    gathered: list[tuple[ExportGroup, int]] = []
    for group, machine in zip(groups, of_groups, strict=True):
        if group.pieces is not None and holders[machine].can_write(group.pieces):
            direct.append(group)
            used = {piece.source for tensor in group.pieces.values() for piece in tensor.pieces}
            for name in sorted(used - {None}, key=str):
                owners[str(name)] = holders[machine].owners_of(str(name), loads)
        else:
            writer = min(members[machine], key=loads.__getitem__)
            loads[writer] += sum(tensor.num_bytes for tensor in group.outputs)
            gathered.append((group, writer))
    return Assignment(direct, owners, gathered, loads)


def _machines_of(groups: Sequence[ExportGroup], layouts: Sequence[FileLayout], machines: Sequence[str]) -> list[str]:
    """Return the machine of each group. Files take turns, but for those that one group fills together."""
    file_of = {name: number for number, layout in enumerate(layouts) for name in layout.tensors}
    of_files: dict[int, str] = {}
    of_groups: list[str] = []
    for group in groups:
        files = sorted({file_of[tensor.name] for tensor in group.outputs})
        machine = of_files.get(files[0], machines[files[0] % len(machines)])
        of_files.update(dict.fromkeys(files, machine))
        of_groups.append(machine)
    return of_groups


@dataclasses.dataclass(frozen=True, slots=True)
class _Spread:
    """How a tensor is spread over the ranks of a machine: all holders of each part."""

    parts: Sequence[tuple[tuple[LocalBox, ...], list[int]]]
    is_complete: bool


@final
class _Holders:
    """Tells which ranks of a machine hold what."""

    def __init__(self, ranks: Sequence[int], holdings: Sequence[Holdings], inputs: Mapping[str, Described]) -> None:
        self._ranks, self._holdings, self._inputs = ranks, holdings, inputs
        self._positions = {name: position for position, name in enumerate(inputs)}
        # Most tensors of a model are spread in one of a few ways.
        self._spreads: dict[tuple[object, ...], _Spread] = {}

    def can_write(self, pieces: Mapping[str, TensorPieces]) -> bool:
        """Tell whether the ranks hold all pieces, and it pays off that they write them where they belong."""
        sources = {piece.source for tensor in pieces.values() for piece in tensor.pieces}
        spreads = {name: self._spread(name) for name in sources if name is not None}
        if not all(spread.is_complete for spread in spreads.values()):
            return False
        num_elements = sum(math.prod(tensor.shape) for tensor in pieces.values())
        num_pieces = sum(len(tensor.pieces) for tensor in pieces.values())
        if num_pieces * _PIECE_S + num_elements * _RUN_S < _SHORT_S:
            return True
        seconds = num_pieces * _PIECE_S
        for tensor in pieces.values():
            seconds += _RUN_S * sum(_num_runs(piece, tensor, spreads) for piece in tensor.pieces)
        num_bytes = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in pieces.values())
        return seconds < max(_SHORT_S, num_bytes / _GATHERED_BYTES_PER_S)

    def owners_of(self, name: str, loads: list[int]) -> frozenset[int]:
        """Choose a rank for each part of a tensor, and add what it gets to the loads."""
        chosen: list[int] = []
        for boxes, ranks in self._spread(name).parts:
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += num_elements(boxes) * self._inputs[name].dtype.itemsize
            chosen.append(rank)
        return frozenset(chosen)

    def _spread(self, name: str) -> _Spread:
        position = self._positions[name]
        indices = tuple(self._holdings[rank].indices[position] for rank in self._ranks)
        shape = self._inputs[name].shape
        key = (shape, indices)
        if key not in self._spreads:
            ranks_by_boxes: dict[tuple[LocalBox, ...] | None, list[int]] = {}
            for rank, index in zip(self._ranks, indices, strict=True):
                ranks_by_boxes.setdefault(self._holdings[rank].boxes[index], []).append(rank)
            parts = [(boxes, ranks) for boxes, ranks in ranks_by_boxes.items() if boxes]
            total = sum(num_elements(boxes) for boxes, _ in parts)
            is_complete = None not in ranks_by_boxes and total == math.prod(shape)
            self._spreads[key] = _Spread(parts, is_complete)
        return self._spreads[key]


def _num_runs(piece: Piece, tensor: TensorPieces, spreads: Mapping[str, _Spread]) -> int:
    """Return about how many runs of bytes of an output a piece becomes, cut as its source is."""
    if piece.source is None:
        return 0
    boxes = spreads[piece.source].parts[0][0]
    run = 1
    for dim in reversed(range(len(tensor.shape))):
        size = piece.box.shape[dim]
        source_dim = piece.dims[dim]
        if source_dim is not None:
            size = min(size, max(part.box.shape[source_dim] for part in boxes))
        run *= size
        if size != tensor.shape[dim]:
            break
    return math.prod(piece.box.shape) // run
