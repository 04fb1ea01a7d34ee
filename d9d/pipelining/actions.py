"""What a pipeline rank does, as values: a program is a list of actions per rank. Plain data, without torch.

Each action has a short text form that `parse_action` reads back: the stage, what is done, the microbatch.

==============  =====================================================================
``0F3``         forward pass of microbatch 3 through stage 0
``1B2``         backward pass, gradients of inputs and of weights
``1I2``         its first half: gradients of the inputs, which the stage before waits for
``1W2``         its second half: gradients of the weights, which can be computed later
``0SEND_F3``    send what stage 0 has made of microbatch 3 to the stage after it
``1RECV_F3``    receive the input of stage 1
``1SEND_B2``    send the gradients of the input of stage 1 to the stage before it
``0RECV_B2``    receive the gradients of the output of stage 0
``0F3|1B2``     several actions as one, which a schedule wants to overlap
==============  =====================================================================
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import ClassVar, Protocol, TypeAlias

__all__ = [
    "ACTION_KINDS",
    "ActionBase",
    "ActionContext",
    "ActionWorkType",
    "BackwardFullInputComputeAction",
    "BackwardReceiveAction",
    "BackwardSendAction",
    "BackwardWeightComputeAction",
    "ComposeAction",
    "ForwardComputeAction",
    "ForwardReceiveAction",
    "ForwardSendAction",
    "Program",
    "flat_actions",
    "format_program",
    "parse_action",
    "parse_program",
]


class ActionWorkType(StrEnum):
    """What an action keeps busy."""

    compute = "compute"
    """The device of the rank."""
    communicate = "communicate"
    """The link to another rank."""


class ActionContext(Protocol):
    """What actions act on: the stages of a rank, in the middle of a pack."""

    def forward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Run a microbatch through a stage, and the callback of the step behind the last one."""
        ...

    def backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute all gradients of a microbatch in a stage."""
        ...

    def backward_input(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute the gradients of a stage's inputs, and keep what `backward_weight` needs."""
        ...

    def backward_weight(self, stage_idx: int, microbatch_idx: int) -> None:
        """Compute the gradients of a stage's weights that `backward_input` has left out."""
        ...

    def send_forward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to send the output of a stage to the rank of the next one."""
        ...

    def receive_forward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to receive the input of a stage; its forward pass waits for it."""
        ...

    def send_backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to send the gradients of a stage's input to the rank of the stage before."""
        ...

    def receive_backward(self, stage_idx: int, microbatch_idx: int) -> None:
        """Start to receive the gradients of a stage's output; its backward pass waits for them."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ActionBase(abc.ABC):
    """One thing that a rank does. Derive from it to add an action of your own to a program.

    The passes over programs (communication, validation, timelines) leave actions that they do not know where they are.
    """

    work_type: ClassVar[ActionWorkType]
    """What the action keeps busy."""
    has_backward_work: ClassVar[bool]
    """Whether the action belongs to a backward pass."""

    @abc.abstractmethod
    def apply(self, ctx: ActionContext) -> None:
        """Do it. This runs in the step: it must not wait for the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardComputeAction(ActionBase):
    """Runs a microbatch through a stage."""

    work_type: ClassVar = ActionWorkType.compute
    has_backward_work: ClassVar = False

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        """Run the forward pass."""
        ctx.forward(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}F{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardFullInputComputeAction(ActionBase):
    """Runs the backward pass of a microbatch through a stage, or the half of it that other stages wait for."""

    work_type: ClassVar = ActionWorkType.compute
    has_backward_work: ClassVar = True

    stage_idx: int
    microbatch_idx: int
    full_backward: bool
    """Compute the gradients of the weights too. Otherwise a `BackwardWeightComputeAction` must follow."""

    def apply(self, ctx: ActionContext) -> None:
        """Run the backward pass, or its first half."""
        if self.full_backward:
            ctx.backward(self.stage_idx, self.microbatch_idx)
        else:
            ctx.backward_input(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}{'B' if self.full_backward else 'I'}{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardWeightComputeAction(ActionBase):
    """Computes the gradients of a stage's weights for a microbatch."""

    work_type: ClassVar = ActionWorkType.compute
    has_backward_work: ClassVar = True

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        """Run the second half of the backward pass."""
        ctx.backward_weight(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}W{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardSendAction(ActionBase):
    """Sends the output of a stage to the stage after it."""

    work_type: ClassVar = ActionWorkType.communicate
    has_backward_work: ClassVar = False

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        """Start the transfer."""
        ctx.send_forward(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}SEND_F{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardReceiveAction(ActionBase):
    """Receives the input of a stage from the stage before it."""

    work_type: ClassVar = ActionWorkType.communicate
    has_backward_work: ClassVar = False

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        """Start the transfer."""
        ctx.receive_forward(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}RECV_F{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardSendAction(ActionBase):
    """Sends the gradients of a stage's input to the stage before it."""

    work_type: ClassVar = ActionWorkType.communicate
    has_backward_work: ClassVar = True

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        """Start the transfer."""
        ctx.send_backward(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}SEND_B{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardReceiveAction(ActionBase):
    """Receives the gradients of a stage's output from the stage after it."""

    work_type: ClassVar = ActionWorkType.communicate
    has_backward_work: ClassVar = True

    stage_idx: int
    microbatch_idx: int

    def apply(self, ctx: ActionContext) -> None:
        """Start the transfer."""
        ctx.receive_backward(self.stage_idx, self.microbatch_idx)

    def __str__(self) -> str:
        return f"{self.stage_idx}RECV_B{self.microbatch_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class ComposeAction(ActionBase):
    """Does several actions as one, in their order; schedules use it for passes that are to overlap."""

    actions: tuple[ActionBase, ...]

    def apply(self, ctx: ActionContext) -> None:
        """Do the actions."""
        for action in self.actions:
            action.apply(ctx)

    @property
    def work_type(self) -> ActionWorkType:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the parts
        """What its actions keep busy.

        Raises:
            ValueError: They keep different things busy.
        """
        types = {action.work_type for action in self.actions}
        if len(types) != 1:
            raise ValueError(f"{self} mixes actions that compute with actions that communicate.")
        return types.pop()

    @property
    def has_backward_work(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the parts
        """Whether one of the actions belongs to a backward pass."""
        return any(action.has_backward_work for action in self.actions)

    def __str__(self) -> str:
        return "|".join(map(str, self.actions))


Program: TypeAlias = dict[int, list[ActionBase]]
"""The actions of each pipeline rank, in the order in which it does them."""

ActionKinds: TypeAlias = Mapping[str, Callable[[int, int], ActionBase]]
"""Builds an action from its stage and microbatch, by the name between them in its text form."""

ACTION_KINDS: ActionKinds = {
    "F": ForwardComputeAction,
    "B": lambda stage, microbatch: BackwardFullInputComputeAction(stage, microbatch, full_backward=True),
    "I": lambda stage, microbatch: BackwardFullInputComputeAction(stage, microbatch, full_backward=False),
    "W": BackwardWeightComputeAction,
    "SEND_F": ForwardSendAction,
    "RECV_F": ForwardReceiveAction,
    "SEND_B": BackwardSendAction,
    "RECV_B": BackwardReceiveAction,
}
"""The actions of this module, for `parse_action`."""

_TEXT_FORM = re.compile(r"(\d+)([A-Z_]+)(\d+)")


def parse_action(text: str, kinds: ActionKinds = ACTION_KINDS) -> ActionBase:
    """Read the text form of an action.

    Args:
        text: Such as ``1B2`` or ``0F3|1B2``.
        kinds: The actions to know. Add your own with ``{**ACTION_KINDS, "OFFLOAD": OffloadAction}``.

    Raises:
        ValueError: If the text is no action.
    """
    if "|" in text:
        return ComposeAction(tuple(parse_action(part, kinds) for part in text.split("|")))
    match = _TEXT_FORM.fullmatch(text)
    if match is None or match[2] not in kinds:
        raise ValueError(
            f"{text!r} is not an action: write stage, kind and microbatch, such as 0F3; kinds are {', '.join(kinds)}."
        )
    return kinds[match[2]](int(match[1]), int(match[3]))


def parse_program(text: str, kinds: ActionKinds = ACTION_KINDS) -> Program:
    """Read a program with one line per rank, actions separated by blanks, as `format_program` writes it."""
    lines = [line.split(":")[-1].split() for line in text.strip().splitlines()]
    return {rank: [parse_action(word, kinds) for word in line] for rank, line in enumerate(lines)}


def format_program(program: Program) -> str:
    """Write a program with one line per rank, such as ``rank 0: 0F0 0SEND_F0``."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, program[rank]))}" for rank in sorted(program))


def flat_actions(actions: Iterable[ActionBase]) -> Iterable[ActionBase]:
    """Yield the actions with composed ones taken apart, in order."""
    for action in actions:
        if isinstance(action, ComposeAction):
            yield from flat_actions(action.actions)
        else:
            yield action
