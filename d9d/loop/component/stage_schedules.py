"""Learning rate schedules of stages, from a checkpoint of the same or of another cut into stages."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch.optim import Optimizer

from d9d.core.protocol import LRSchedulerProtocol
from d9d.optim.named_state import equal_values

__all__ = ["StageSchedules"]

# `Any` in this module: schedules save what they choose.
_State = dict[str, Any]

_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists in torch's schedules of what each group has too."""
_FUNCTIONS = "lr_lambdas"
"""List in torch's schedules with a function of each group, or None for those that are not saved."""


@final
class StageSchedules:
    """The schedules of the stages of this rank. Not collective.

    Where a stage has the groups of parameters that it had, its schedule gets back its own state. Elsewhere it gets what all
    saved schedules agree on, with the learning rates of its own groups as they have been loaded.

    Args:
        stages: Stages of this rank.
        optimizers: Their optimizers.
        schedules: Their schedules.
    """

    def __init__(
        self, stages: Sequence[int], optimizers: Sequence[Optimizer], schedules: Sequence[LRSchedulerProtocol]
    ) -> None:
        self._stages = [str(stage) for stage in stages]
        self._optimizers = optimizers
        self._schedules = schedules
        self._saved: Mapping[str, _State] = {}
        self._num_saved_groups: Mapping[str, int] = {}
        self._is_as_before: Sequence[bool] = ()

    def state_dict(self) -> dict[str, _State]:
        """Return the state of each schedule by its stage."""
        return {stage: schedule.state_dict() for stage, schedule in zip(self._stages, self._schedules, strict=True)}

    def prepare_to_load(
        self,
        saved: Mapping[str, _State],
        num_saved_groups: Mapping[str, int],
        *,
        is_as_before: Sequence[bool],
    ) -> None:
        """Decide what each schedule gets.

        Args:
            saved: States by stage.
            num_saved_groups: Number of groups of the optimizers that they belonged to, by stage.
            is_as_before: Whether a stage of this rank has the groups of parameters that it had.

        Raises:
            ValueError: If schedules of stages differ, and stages are not what they were.
        """
        if not saved:
            raise ValueError("the checkpoint holds no learning rate schedule, and so is none of a training job.")
        self._saved = saved
        self._num_saved_groups = num_saved_groups
        self._is_as_before = is_as_before
        for position in range(len(self._stages)):
            self._state_of(position)

    def load(self) -> None:
        """Restore the schedules, after the optimizers."""
        for position, schedule in enumerate(self._schedules):
            schedule.load_state_dict(self._state_of(position))

    def _state_of(self, position: int) -> _State:
        if self._is_as_before[position]:
            return self._saved[self._stages[position]]
        groups = self._optimizers[position].param_groups
        first, *others = self._saved.values()
        merged: _State = {}
        for name, value in first.items():
            if name in _OF_GROUPS:
                merged[name] = [group[_OF_GROUPS[name]] for group in groups]
                continue
            values = [value, *(other.get(name) for other in others)]
            if name == _FUNCTIONS and all(function is None for of_stage in values for function in of_stage or ()):
                merged[name] = [None] * len(groups)
                continue
            if any(not equal_values(value, other) for other in values):
                raise ValueError(
                    f"the learning rate schedules of the stages in the checkpoint differ in {name}, so it is not known how "
                    f"those of other stages go on: {values}. Cut the model into the same stages."
                )
            self._refuse_other_groups(name, value, len(groups))
            merged[name] = value
        return merged

    def _refuse_other_groups(self, name: str, value: object, num_groups: int) -> None:
        num_saved = set(self._num_saved_groups.values()) - {num_groups}
        if isinstance(value, list) and len(value) in num_saved:
            raise ValueError(
                f"the learning rate schedules in the checkpoint have a list {name} of {len(value)} values, perhaps one for "
                f"each group of the optimizer. Here are {num_groups} groups. Keep the number of groups."
            )
