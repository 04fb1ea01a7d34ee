"""Actions read and written as text, and actions of one's own through all passes over programs."""

import dataclasses
from typing import ClassVar

import pytest

from d9d.pipelining.actions import (
    ACTION_KINDS,
    ActionBase,
    ActionContext,
    ActionWorkType,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ComposeAction,
    ForwardComputeAction,
    ForwardSendAction,
    flat_actions,
    format_program,
    parse_action,
    parse_program,
)
from d9d.pipelining.communications import add_communication_ops
from d9d.pipelining.timeline import ActionCosts, simulate
from d9d.pipelining.validate import validate_program


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", ForwardComputeAction(0, 3)),
        ("1B2", BackwardFullInputComputeAction(1, 2, full_backward=True)),
        ("1I2", BackwardFullInputComputeAction(1, 2, full_backward=False)),
        ("12W34", BackwardWeightComputeAction(12, 34)),
        ("0SEND_F3", ForwardSendAction(0, 3)),
        (
            "0F3|1B2",
            ComposeAction((ForwardComputeAction(0, 3), BackwardFullInputComputeAction(1, 2, full_backward=True))),
        ),
    ],
)
def test_text_form_stands_for_the_action(text: str, action: ActionBase):
    assert parse_action(text) == action
    assert str(action) == text


def test_program_survives_its_text_form():
    text = "rank 0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0"
    assert format_program(parse_program(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0f0", "0F0 1F0", "0F0|"])
def test_other_text_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is not an action.*F, B, I, W"):
        parse_action(text)


def test_work_of_actions():
    assert parse_action("0F0|1B0").work_type == ActionWorkType.compute
    assert parse_action("0F0|1B0").has_backward_work
    assert not parse_action("0F0|0SEND_F1|1F0").has_backward_work
    with pytest.raises(ValueError, match="mixes"):
        _ = parse_action("0F0|0SEND_F0").work_type


def test_composed_actions_are_taken_apart_in_order():
    inner = ComposeAction((parse_action("0F1"), parse_action("1B0")))
    flat = flat_actions([parse_action("0F0"), ComposeAction((inner, parse_action("1W0")))])
    assert [str(action) for action in flat] == ["0F0", "0F1", "1B0", "1W0"]


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadAction(ActionBase):
    """Moves the activations of a microbatch to the host: an action that this package does not know."""

    work_type: ClassVar = ActionWorkType.compute
    has_backward_work: ClassVar = False

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        pass

    def __str__(self) -> str:
        return f"{self.stage_idx}OFFLOAD{self.microbatch_idx}"


def test_an_action_of_ones_own_keeps_its_place_in_all_passes():
    kinds = {**ACTION_KINDS, "OFFLOAD": OffloadAction}
    compute = parse_program("rank 0: 0F0 0OFFLOAD0 0B0\nrank 1: 1F0 1B0 1OFFLOAD0", kinds)

    program = add_communication_ops(compute, {0: 0, 1: 1}, num_stages=2)

    assert format_program(program) == (
        "rank 0: 0F0 0SEND_F0 0OFFLOAD0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1OFFLOAD0"
    )
    validate_program(program)
    assert simulate(program, ActionCosts()).makespan == 6
    assert simulate(program, ActionCosts(measured={"1OFFLOAD0": 5})).makespan == 9
