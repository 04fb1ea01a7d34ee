"""Everything of a job that a checkpoint holds."""

import dataclasses
import re
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from d9d.checkpoint import Document
from d9d.core.device import random_state, set_random_state
from d9d.core.dist_context import DistributedContext
from d9d.core.placement import local_tensor
from d9d.loop.component.checkpointer import SavedTensors
from d9d.loop.component.data_position import STREAM_KEY
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.pipelining.training import PipelinedOptimizer

_ONLY_IN_TRAINING = ("tracked_modules.", "optimizer.")
"""Beginnings of keys that tell the checkpoint of a training job."""
_LEVELS_OF_JOB = {"task": 0, "lr_scheduler": 1, STREAM_KEY: 1, "logger": 2}
"""How many levels of keys are the job's own in states whose form belongs to others, see [Note: documents]."""
_LEFT = re.compile(r"cut\.|logger\.|of_[0-9]+_ranks\.")
"""Beginnings of keys that a job may not ask for: what tells the cut, a tracker that is off, the state of other ranks."""


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointedState(Stateful):
    """The parts of a job whose state a checkpoint holds, by their key in it.

    [Note: state of a rank]
    Random generators and partial sums of metrics differ from rank to rank. They are saved under the number of ranks and
    the rank, and restored where a job resumes on as many ranks; elsewhere both start anew.

    [Note: state of the last stage]
    In a pipeline a task sees losses and outputs on the ranks with the last stage only. What it counts there is saved
    from there, and restored on all ranks.
    """

    dist_context: DistributedContext
    parts: Mapping[str, Stateful]
    """State that belongs to the job. In training it includes ``optimizer``, a `PipelinedOptimizer`."""
    parts_of_rank: Mapping[str, Stateful]
    """State that belongs to this rank."""
    stages_by_rank: tuple[tuple[int, ...], ...] = ((0,),)
    """Stages that each pipeline rank hosts."""
    saved_elsewhere: Container[str] = ()
    """Keys of the parts that other ranks save. See [Note: state of the last stage]."""
    has_state_of_rank: bool = True
    """Whether the checkpoint to load was saved by as many ranks."""
    is_loading: bool = False
    """Whether `state_dict` is asked for what is to be loaded."""

    def prepare_to_load(self, saved: SavedTensors) -> None:
        """Make room for the state of optimizers, which have none before their first step.

        Raises:
            ValueError: If an inference job finds the checkpoint of a training job, whose steps are other ones, or a
                training job one of a model that was cut into other stages.
        """
        optimizer = self.parts.get("optimizer")
        if optimizer is None:
            refuse_training_checkpoint(saved)
        if optimizer is not None:
            self._refuse_other_cut(saved)
        if isinstance(optimizer, PipelinedOptimizer):
            for key, of_stage in optimizer.by_stage.items():
                assert isinstance(of_stage, Optimizer)  # so says the optimizer provider
                prefix = f"optimizer.{key}.state."
                entries = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
                _make_room(of_stage, entries)
        self.is_loading = True
        self.has_state_of_rank = any(name.startswith(f"{self._ranks_key}.") for name in saved)

    def may_be_left(self, key: str) -> bool:
        """Tell whether something that a checkpoint holds, and no rank asks for, is no mistake."""
        return _LEFT.match(key) is not None

    def _refuse_other_cut(self, saved: SavedTensors) -> None:
        """Refuse to load stages by their place on a rank where another stage was saved."""
        cuts = [name.removeprefix("cut.") for name in saved if name.startswith("cut.")]
        if cuts and cuts != [self._cut]:
            raise ValueError(
                f"cannot resume: the pipeline ranks of the job that wrote the newest checkpoint host stages {cuts[0]}, "
                f"those of this job {self._cut}. Set mesh.pipeline_parallel and trainer.pipelining.schedule as they were, "
                f"or start another run (run.name)."
            )

    def _optimized(self) -> dict[str, list[str]]:
        """Name the parameters of each optimizer, in the order in which their state is numbered."""
        tracked, optimizer = self.parts.get("tracked_modules"), self.parts.get("optimizer")
        if not isinstance(optimizer, PipelinedOptimizer) or not isinstance(tracked, TrackedModules):
            return {}
        names = {id(parameter): name for module in tracked.modules for name, parameter in module.named_parameters()}
        return {
            key: [
                names.get(id(parameter), "unnamed") for group in of_stage.param_groups for parameter in group["params"]
            ]
            for key, of_stage in optimizer.by_stage.items()
            if isinstance(of_stage, Optimizer)
        }

    def _refuse_other_parameters(self, saved: dict[str, list[str]]) -> None:
        """Refuse state that is saved by number where another parameter has that number."""
        for stage, here in self._optimized().items():
            there = saved[stage]
            if there != here:
                changed = [f"{old} there, {new} here" for old, new in zip(there, here, strict=False) if old != new]
                raise ValueError(
                    f"the optimizer of {stage} has {len(there)} parameters in the checkpoint and {len(here)} in the job, or "
                    f"in another order: {'; '.join(changed[:3]) or 'the last ones'}. Build it from the same ones."
                )

    @property
    def _cut(self) -> str:
        return " | ".join(" and ".join(map(str, stages)) for stages in self.stages_by_rank)

    @property
    def _ranks_key(self) -> str:
        return f"of_{self.dist_context.world_size}_ranks"

    # Any: state dicts hold what their owners choose.
    def state_dict(self) -> dict[str, Any]:
        """Return references to the state of all parts."""
        state: dict[str, Any] = {
            name: _with_documents(part.state_dict(), _LEVELS_OF_JOB[name])
            if name in _LEVELS_OF_JOB
            else part.state_dict()
            for name, part in self.parts.items()
            if self.is_loading or name not in self.saved_elsewhere
        }
        if "optimizer" in self.parts:
            state["optimized"] = self._optimized()
        if "optimizer" in self.parts and not self.is_loading:
            # The name is what is saved: it can be read before anything is loaded.
            state["cut"] = {self._cut: 0}
        if self.has_state_of_rank:
            of_rank = {name: Document(part.state_dict()) for name, part in self.parts_of_rank.items()}
            state[self._ranks_key] = {str(self.dist_context.rank): of_rank}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all parts.

        Raises:
            ValueError: If an optimizer has other parameters than when it was saved.
        """
        if "optimizer" in self.parts:
            self._refuse_other_parameters(state_dict["optimized"])
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        if self.has_state_of_rank:
            of_rank = state_dict[self._ranks_key][str(self.dist_context.rank)]
            for name, part in self.parts_of_rank.items():
                part.load_state_dict(of_rank[name])
        self.has_state_of_rank, self.is_loading = True, False


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


def _make_room(optimizer: Optimizer, saved: SavedTensors) -> None:
    """Give an optimizer an empty state of the saved shapes, laid out like its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, metadata in saved.items():
        index, _, name = key.partition(".")
        if int(index) >= len(parameters):
            continue  # nobody asks for it, and that is refused with its name
        parameter = parameters[int(index)]
        if not isinstance(metadata, TensorStorageMetadata):
            optimizer.state[parameter][name] = None
        elif metadata.size == parameter.shape and name != "step":
            local = local_tensor(parameter)
            empty = torch.empty(local.shape, dtype=metadata.properties.dtype, device=local.device)
            optimizer.state[parameter][name] = empty
        else:
            optimizer.state[parameter][name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
