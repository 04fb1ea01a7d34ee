"""Everything of a job that a checkpoint holds."""

import dataclasses
import re
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from d9d.checkpoint import CheckpointContents, Document
from d9d.core.device import random_state, set_random_state
from d9d.core.dist_context import DistributedContext
from d9d.loop.component.data_position import STREAM_KEY
from d9d.loop.component.trained_state import TrainedState

_ONLY_IN_TRAINING = ("tracked_modules.", "model.", "optimizer.")
"""Beginnings of keys that tell the checkpoint of a training job."""
_LEVELS_OF_JOB = {"task": 0, STREAM_KEY: 1, "logger": 2}
"""How many levels of keys are the job's own in states whose form belongs to others, see [Note: documents]."""
_OF_RANKS = re.compile(r"(of_[0-9]+_ranks[^.]*)\.")
"""Beginning of the keys of the state of ranks, with the ranks."""
_LEFT = re.compile(r"logger\.|of_[0-9]+_ranks")
"""Beginnings of keys that a job may not ask for: a tracker that is off, the state of other ranks."""


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointedState(Stateful):
    """The parts of a job whose state a checkpoint holds, by their key in it.

    [Note: state of a rank]
    Random generators and partial sums of metrics differ from rank to rank, and what a rank has of them makes sense in its place
    in the mesh only: peers that hold the same activations have the same sums. They are saved under the mesh and the rank, and
    restored where a job resumes on the same mesh; elsewhere both start anew, and that is told.

    [Note: state of the last stage]
    In a pipeline a task sees losses and outputs on the ranks with the last stage only. What it counts there is saved
    from there, and restored on all ranks.
    """

    dist_context: DistributedContext
    parts: Mapping[str, Stateful]
    """State that belongs to the job."""
    parts_of_rank: Mapping[str, Stateful]
    """State that belongs to this rank."""
    trained: TrainedState | None = None
    """What training changes; None in inference."""
    saved_elsewhere: Container[str] = ()
    """Keys of the parts that other ranks save. See [Note: state of the last stage]."""
    told: list[str] = dataclasses.field(default_factory=list[str])
    """What people should know about what was loaded."""
    _ranks_to_load: str | None = None

    # Any: state dicts hold what their owners choose.
    def prepare_to_load(self, contents: CheckpointContents) -> dict[str, Any]:
        """Return room for what is to be loaded.

        Raises:
            ValueError: If an inference job finds the checkpoint of a training job, whose steps are other ones, or a training
                job one that `TrainedState` can not resume from.
        """
        if self.trained is None:
            refuse_training_checkpoint(contents.names)
        self.told = []
        self._ranks_to_load = self._find_ranks(contents)
        state = self._state_of_parts(self.parts)
        if self._ranks_to_load is not None:
            state[self._ranks_to_load] = self._state_of_rank()
        if self.trained is not None:
            state |= self.trained.prepare_to_load(contents)
        return state

    def may_be_left(self, key: str) -> bool:
        """Tell whether something that a checkpoint holds, and no rank asks for, is no mistake."""
        return _LEFT.match(key) is not None or (self.trained is not None and self.trained.may_be_left(key))

    def _find_ranks(self, contents: CheckpointContents) -> str | None:
        """Return the key of the state of ranks, if it can be restored on this mesh."""
        saved = dict.fromkeys(match[1] for name in contents.names if (match := _OF_RANKS.match(name)))
        if self._ranks_key in saved or not saved:
            return self._ranks_key if saved else None
        self.told.append(
            f"random generators and the sums of metrics since they were last logged start anew: they are those of another "
            f"mesh, {', '.join(saved)}, and this job is {self._ranks_key}"
        )
        return None

    @property
    def _ranks_key(self) -> str:
        degrees = {name: degree for name, degree in self.dist_context.mesh_params.model_dump().items() if degree > 1}
        mesh = "".join(f", {name} {degree}" for name, degree in degrees.items())
        cut = (
            "" if self.trained is None or not self.dist_context.mesh_params.has_pipeline_parallel else self.trained.cut
        )
        return f"of_{self.dist_context.world_size}_ranks{mesh}{cut and f', stages {cut}'}"

    # Any: state dicts hold what their owners choose.
    def _state_of_parts(self, parts: Mapping[str, Stateful]) -> dict[str, Any]:
        return {
            name: _with_documents(part.state_dict(), _LEVELS_OF_JOB[name])
            if name in _LEVELS_OF_JOB
            else part.state_dict()
            for name, part in parts.items()
        }

    def _state_of_rank(self) -> dict[str, Any]:
        return {
            str(self.dist_context.rank): {
                name: Document(part.state_dict()) for name, part in self.parts_of_rank.items()
            }
        }

    def state_dict(self) -> dict[str, Any]:
        """Return references to the state of all parts."""
        state = self._state_of_parts(
            {name: part for name, part in self.parts.items() if name not in self.saved_elsewhere}
        )
        state[self._ranks_key] = self._state_of_rank()
        if self.trained is not None:
            state |= self.trained.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all parts.

        Args:
            state_dict: What `prepare_to_load` returned, filled.

        Raises:
            ValueError: If parameters of one group of an optimizer had different options.
        """
        if self.trained is not None:
            self.told += self.trained.load_state_dict(state_dict)
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        if self._ranks_to_load is not None:
            of_rank = state_dict[self._ranks_to_load][str(self.dist_context.rank)]
            for name, part in self.parts_of_rank.items():
                part.load_state_dict(of_rank[name])


# Any: state dicts hold what their owners choose.
def _with_documents(state: Any, num_levels: int) -> Any:  # noqa: ANN401
    """Mark what is below some levels of keys as documents."""
    if num_levels == 0:
        return Document(state)
    return {key: _with_documents(value, num_levels - 1) for key, value in state.items()}


def refuse_training_checkpoint(keys: Collection[str]) -> None:
    """Refuse a checkpoint of a training job, whose steps are other ones, in an inference job.

    Args:
        keys: Flattened keys of the checkpoint.

    Raises:
        ValueError: It is one.
    """
    if any(name.startswith(_ONLY_IN_TRAINING) for name in keys):
        raise ValueError(
            "checkpointing.save_dir holds checkpoints of a training job. Name a folder of its own for inference."
        )


class RandomState(Stateful):
    """The random generators of the host and the device of this rank."""

    def __init__(self, device: torch.device) -> None:
        """Take the device of this rank."""
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators as tensors."""
        return dict(random_state(self._device))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the generators."""
        set_random_state(self._device, state_dict)
