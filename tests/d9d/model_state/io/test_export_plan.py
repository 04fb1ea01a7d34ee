"""Who writes what, for ranks and machines that are only described."""

from collections.abc import Sequence

import pytest
import torch

from d9d.core.types import TensorSpec
from d9d.model_state.io.boxes import LocalBox
from d9d.model_state.io.export_plan import Assignment, ExportGroup, Holdings, assign
from d9d.model_state.io.file_layout import StoredTensor, lay_out
from d9d.model_state.mapper.base import StateGroup
from d9d.model_state.mapper.pieces import Box, TensorPieces


def held(start: Sequence[int], shape: Sequence[int]) -> tuple[LocalBox, ...]:
    return (LocalBox(Box(tuple(start), tuple(shape)), Box.whole(tuple(shape))),)


def plan(
    shapes: Sequence[tuple[int, ...]],
    boxes: Sequence[Sequence[tuple[LocalBox, ...] | None]],
    machines: Sequence[str | None],
    shard_bytes: int = 10**9,
    *,
    is_traced: bool = True,
) -> Assignment:
    """Assign tensors that stay as they are, named by letters; `boxes` are those of each rank."""
    inputs = {"abcdef"[number]: TensorSpec(shape, torch.float32) for number, shape in enumerate(shapes)}
    groups = [
        ExportGroup(
            StateGroup.of([name], [name]),
            (name,),
            (StoredTensor(name, spec.shape, spec.dtype),),
            {name: TensorPieces.whole(name, spec.shape, spec.dtype)} if is_traced else None,
        )
        for name, spec in inputs.items()
    ]
    layouts = lay_out([tensor for group in groups for tensor in group.outputs], shard_bytes)
    holdings = [Holdings(rank, own, range(len(own))) for rank, own in enumerate(boxes)]
    return assign(groups, inputs, layouts, holdings, machines)


def described(assignment: Assignment) -> dict[str, object]:
    """For each tensor, the ranks that write their parts, or the one that gathers it."""
    direct: dict[str, object] = {name: sorted(ranks) for name, ranks in assignment.owners.items()}
    return direct | {group.inputs[0]: writer for group, writer in assignment.gathered}


HALVES = [held([0, 0], [2, 3]), held([2, 0], [2, 3])]
WHOLE = held([0, 0], [4, 3])


def test_shards_are_written_by_their_holders():
    assert described(plan([(4, 3)], [[half] for half in HALVES], ["m", "m"])) == {"a": [0, 1]}


def test_replicas_take_turns_by_bytes():
    shapes = [(4, 3), (4, 3), (2, 3), (4, 3), (2, 3)]
    own = [held([0, 0], shape) for shape in shapes]
    # 48 bytes each for 0 and 1; 24 more for 0, 48 for 1, 24 for 0
    assert described(plan(shapes, [own, own], ["m", "m"])) == {"a": [0], "b": [1], "c": [0], "d": [1], "e": [0]}
    assert plan(shapes, [own, own], ["m", "m"]).loads == [96, 96]


def test_one_of_those_that_hold_the_same_shard():
    boxes = [[HALVES[0], HALVES[0]], [HALVES[1], HALVES[1]], [HALVES[0], HALVES[0]], [HALVES[1], HALVES[1]]]
    assert described(plan([(4, 3), (4, 3)], boxes, ["m"] * 4)) == {"a": [0, 1], "b": [2, 3]}


def test_machines_that_hold_everything_get_files_in_turn():
    boxes = [[half] * 3 for half in HALVES * 2]
    machines = ["m", "m", "n", "n"]
    assert described(plan([(4, 3)] * 3, boxes, machines, 48)) == {"a": [0, 1], "b": [2, 3], "c": [0, 1]}
    # In one file, of one machine.
    assert described(plan([(4, 3)] * 3, boxes, machines)) == {"a": [0, 1], "b": [0, 1], "c": [0, 1]}


def test_shards_of_several_machines_are_gathered_to_the_one_of_the_file():
    boxes = [[half] * 2 for half in HALVES]
    assert described(plan([(4, 3)] * 2, boxes, ["m", "n"], 48)) == {"a": 0, "b": 1}
    assert described(plan([(4, 3)] * 2, boxes, ["m", "n"])) == {"a": 0, "b": 0}
    # The second one does not see the files.
    assert described(plan([(4, 3)] * 2, boxes, ["m", None], 48)) == {"a": 0, "b": 0}


@pytest.mark.parametrize(("boxes", "is_traced"), [([[HALVES[0]], [None]], True), ([[WHOLE], [WHOLE]], False)])
def test_what_cannot_be_written_in_parts(boxes: list[list[tuple[LocalBox, ...] | None]], is_traced: bool):
    assert described(plan([(4, 3)], boxes, ["m", "m"], is_traced=is_traced)) == {"a": 0}


def test_an_empty_shard_is_no_part():
    assert described(plan([(4, 3)], [[WHOLE], [()]], ["m", "m"])) == {"a": [0]}


@pytest.mark.parametrize(("row_elements", "is_direct"), [(8, False), (256, True)])
def test_small_scattered_parts_are_gathered(row_elements: int, is_direct: bool):
    """Rows of 16 bytes, of which each would be a write of its own, or of 512."""
    shape = (100_000, row_elements)
    halves = [held([0, start], [shape[0], row_elements // 2]) for start in (0, row_elements // 2)]
    expected: object = [0, 1] if is_direct else 0
    assert described(plan([shape], [[half] for half in halves], ["m", "m"])) == {"a": expected}
