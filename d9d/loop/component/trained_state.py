"""What training changes, in the form in which a checkpoint holds it: weights, optimizers, learning rate schedules.

[Note: the cut of a checkpoint]
Tensors are saved under keys that no cut into stages changes, see [Note: keys of tensors], state of optimizers likewise, and
schedules by stage. So a job may host the stages elsewhere or cut the model otherwise. Refused are parameters that have names of
their stage (``layers.0`` in each of them), and schedules that differ between stages, since nobody knows what to make of them.
"""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.checkpoint import CheckpointContents, Document, OnChangedParameters
from d9d.core.dist_context import DistributedContext
from d9d.internals.stage_names import SavedNames, agree_on_names, stage_key
from d9d.loop.component.stage_schedules import StageSchedules
from d9d.loop.component.tracked_modules import StatefulPredicate, TrackedModules
from d9d.optim.named_state import (
    OptimizerRecord,
    SavedOptions,
    describe_optimizer,
    equal_values,
    load_named_state,
    named_state,
    room_for_state,
    state_problems,
)
from d9d.pipelining.training import PipelinedLRScheduler, PipelinedOptimizer

__all__ = ["TrainedState"]

_MODEL, _STATE, _RECORDS = "model", "optimizer.state", "optimizer.stages"
_OF_STAGE = re.compile(r"stage [0-9]+: ")
_NUM_NAMED = 8


@final
class TrainedState:
    """The stages of this rank with their optimizers and schedules. See [Note: the cut of a checkpoint]. Not collective.

    Args:
        names: Keys of all tensors.
        modules: Stages of this rank, in stage order, as are the others.
        optimizers: Their optimizers.
        schedules: Their learning rate schedules.
        is_saved: Chooses the entries of modules that checkpoints hold, beside those that an earlier one held.
        stages_by_rank: Stages that each pipeline rank hosts.
        on_changed: What to do about parameters that only the checkpoint or only the job has.
        is_of_first_replica: Whether entries that may differ between replicas, such as buffers, are saved from here.
    """

    def __init__(
        self,
        names: SavedNames,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedules: StageSchedules,
        is_saved: StatefulPredicate,
        stages_by_rank: Sequence[Sequence[int]],
        on_changed: OnChangedParameters = "raise",
        *,
        is_of_first_replica: bool = True,
    ) -> None:
        self._names = names
        self._modules = modules
        self._optimizers = optimizers
        self._schedules = schedules
        self._is_saved = is_saved
        self._on_changed: OnChangedParameters = on_changed
        self._is_of_first_replica = is_of_first_replica
        self._keys = names.key_of_parameters(modules)
        self._kept: set[str] = set()
        """Keys of entries that a checkpoint has held. Frozen later, they are still not what the job starts with."""
        self._plan: _LoadPlan | None = None
        self.cut = " | ".join(" and ".join(map(str, stages)) for stages in stages_by_rank)
        """Stages that the pipeline ranks host, in words."""

    @classmethod
    def of_job(
        cls,
        context: DistributedContext,
        modules: TrackedModules,
        optimizer: PipelinedOptimizer,
        lr_scheduler: PipelinedLRScheduler,
        stages_by_rank: Sequence[Sequence[int]],
        on_changed: OnChangedParameters,
    ) -> "TrainedState":
        """Agree on the names of all tensors. All ranks must call it, when nothing changes the modules any more."""
        group = context.pipeline_group if context.mesh_params.has_pipeline_parallel else None
        stages = stages_by_rank[0 if group is None else group.rank()]
        optimizers = cast("list[Optimizer]", list(optimizer.by_stage.values()))  # so says the optimizer provider
        return cls(
            agree_on_names(modules.modules, stages, group),
            modules.modules,
            optimizers,
            StageSchedules(stages, optimizers, list(lr_scheduler.by_stage.values())),
            modules.is_saved,
            stages_by_rank,
            on_changed,
            is_of_first_replica=(context.rank if group is None else dist.get_process_group_ranks(group)[0]) == 0,
        )

    # Any: state dicts hold what their owners choose.
    def state_dict(self) -> dict[str, Any]:
        """Return references to what this rank is to save. Buffers that are no DTensors are saved by the first replica.

        Raises:
            ValueError: If a module has other entries than when their names were agreed on.
        """
        model: dict[str, Any] = {}
        for module, keys in zip(self._modules, self._names.keys, strict=True):
            entries = module.state_dict()
            if new := entries.keys() - keys.keys():
                raise ValueError(
                    f"{type(module).__name__} has got entries since the job was configured, which have no name in a checkpoint: "
                    f"{_listed(new)}. Add them before the optimizer is built."
                )
            saved = {
                keys[name]: value
                for name, value in entries.items()
                if keys[name] in self._kept or self._is_saved(name, module)
            }
            self._kept |= saved.keys()
            model |= {key: value for key, value in saved.items() if self._is_saved_here(key, value)}
        state: dict[str, Any] = {}
        records: dict[str, Document] = {}
        for stage, optimizer, keys in zip(self._names.stages, self._optimizers, self._keys, strict=True):
            state |= named_state(optimizer, keys)
            records[str(stage)] = Document(describe_optimizer(optimizer, keys))
        return {
            "model": model,
            "optimizer": {"state": state, "stages": records},
            "lr_scheduler": {stage: Document(saved) for stage, saved in self._schedules.state_dict().items()},
            # The name is what is saved: it can be read before anything is loaded.
            "cut": {self.cut: 0},
        }

    def _is_saved_here(self, key: str, value: object) -> bool:
        # Replicas agree on parameters, and share the work. Their buffers may differ, and belong together.
        return self._is_of_first_replica or isinstance(value, DTensor) or key in self._names.parameters

    def prepare_to_load(self, contents: CheckpointContents) -> dict[str, Any]:
        """Decide what to load, and return room for it. Reads what is small.

        Raises:
            ValueError: With all reasons why the checkpoint cannot be resumed from.
        """
        plan = _LoadPlan(contents, self._names, self.cut, self._on_changed)
        self._plan = plan
        for module, keys in zip(self._modules, self._names.keys, strict=True):
            state = module.state_dict()
            wanted = {
                name: value for name, value in state.items() if self._is_saved(name, module) or plan.has(keys[name])
            }
            plan.add_module(wanted, keys)
        state: dict[str, Any] = {}
        for stage, optimizer, keys in zip(self._names.stages, self._optimizers, self._keys, strict=True):
            state |= room_for_state(optimizer, plan.saved_keys(keys), plan.options, plan.state_entry)
            plan.add_optimizer(stage, optimizer, keys)
        plan.refuse_problems()
        num_groups = {stage: len(record["groups"]) for stage, record in plan.records.items()}
        schedules = contents.documents("lr_scheduler")
        self._schedules.prepare_to_load(schedules, num_groups, is_as_before=plan.is_as_before)
        return {"model": plan.model, "optimizer": {"state": state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> list[str]:
        """Restore everything.

        Args:
            state_dict: What `prepare_to_load` returned, filled.

        Returns:
            What the user should know about it.

        Raises:
            ValueError: If a module does not take its own entries back.
        """
        plan, self._plan = self._plan, None
        assert plan is not None  # prepare_to_load has come before
        for module, sources in zip(self._modules, plan.sources, strict=True):
            values = {name: state_dict["model"][source] for name, source in sources.items()}
            unexpected = module.load_state_dict(values, strict=False).unexpected_keys
            if unexpected:
                raise ValueError(f"{type(module).__name__} does not know its own entries {', '.join(unexpected)}.")
        self._kept |= {
            keys[name] for keys, sources in zip(self._names.keys, plan.sources, strict=True) for name in sources
        }
        told = list(plan.told)
        state = dict(state_dict["optimizer"]["state"])
        taken: set[str] = set()
        for stage, optimizer, keys, others in zip(
            self._names.stages, self._optimizers, self._keys, plan.others, strict=True
        ):
            saved_keys = plan.saved_keys(keys)
            own = state.keys() & saved_keys.values()
            # Optimizers update their state in place: those of copies of a tied weight must not share it.
            state |= {key: _copied(state[key]) for key in own & taken}
            taken |= own
            differences = load_named_state(optimizer, saved_keys, state, plan.options, others)
            where = f"stage {stage}: " if self._names.num_stages > 1 else ""
            told += [f"{where}{difference}" for difference in differences]
        self._schedules.load()
        return told

    def may_be_left(self, key: str) -> bool:
        """Tell whether something that a checkpoint holds, and no rank asks for, is no mistake."""
        return self._plan is not None and self._plan.may_be_left(key)


class _LoadPlan:
    """Where what a checkpoint holds goes to in a job, and what is wrong with that."""

    def __init__(
        self, contents: CheckpointContents, names: SavedNames, cut: str, on_changed: OnChangedParameters
    ) -> None:
        self._contents = contents
        self._names = names
        self._cut = cut
        self._allows_changes = on_changed == "allow"
        self._saved_cut = next((name.removeprefix("cut.") for name in contents.names if name.startswith("cut.")), cut)
        self._num_saved_stages = len(re.findall(r"\d+", self._saved_cut))
        self._saved = {name.removeprefix(f"{_MODEL}.") for name in contents.names if name.startswith(f"{_MODEL}.")}
        self._known = {*names.parameters, *names.others, *(key for keys in names.aliases.values() for key in keys)}
        self._tables = {_OF_STAGE.sub("", key) for key in names.others}
        self.records: dict[str, OptimizerRecord] = contents.documents(_RECORDS)
        self.options = SavedOptions.of_optimizers(self.records.values())
        self._key_of_state = {
            f"{_STATE}.{key}.{name}": key for key, states in self.options.state_names.items() for name in states
        }
        self.model: dict[str, Any] = {}
        self.sources: list[dict[str, str]] = []
        self.is_as_before: list[bool] = []
        self.others: list[Mapping[str, Any]] = []
        self.problems: list[str] = []
        self.told: list[str] = []
        self._of_other_stages: list[str] = []
        if self._allows_changes:
            self._tell("the checkpoint holds, and the job has not", self._saved - self._known)

    def has(self, key: str) -> bool:
        """Tell whether the checkpoint holds an entry of a module under its own key or another one of the same weight."""
        return self._found(key, self._saved) is not None

    def _found(self, key: str, saved: Collection[str]) -> str | None:
        for candidate in (key, *self._names.aliases.get(key, ())):
            is_of_other_cut = _OF_STAGE.match(candidate) and self._num_saved_stages != self._names.num_stages
            if candidate in saved and not is_of_other_cut:
                return candidate
        return None

    def add_module(self, wanted: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        """Plan where the entries of a stage come from."""
        sources: dict[str, str] = {}
        lacking: list[str] = []
        for name, value in wanted.items():
            key = keys[name]
            source = self._found(key, self._saved) or self._of_another_stage(key, name)
            if source is None and self._allows_changes:
                lacking.append(key)
                continue
            sources[name] = source or key
            self._refuse_different(key, sources[name])
            self.model.setdefault(sources[name], value)
        self.sources.append(sources)
        self._tell("the job has, and the checkpoint does not hold; they keep their first values", lacking)

    def _refuse_different(self, key: str, source: str) -> None:
        """Refuse to make one weight of several that the checkpoint has under the names of it."""
        others = [
            alias for alias in (key, *self._names.aliases.get(key, ())) if alias in self._saved and alias != source
        ]
        if others and not self._are_equal([source, *others]):
            self.problems.append(f"{source} and {', '.join(others)} differ there, and are one weight in the job")

    def _of_another_stage(self, key: str, name: str) -> str | None:
        """Find an entry whose name is one of a stage, here or in the checkpoint."""
        copies = [
            key for key in (stage_key(stage, name) for stage in range(self._num_saved_stages)) if key in self._saved
        ]
        if _OF_STAGE.match(key) and name in self._saved:
            copies.append(name)
        if not copies:
            return None
        if key in self._names.others and self._are_equal(copies):
            return copies[0]  # a table that each stage has
        self._of_other_stages.append(name)
        return copies[0]

    def _are_equal(self, copies: Sequence[str]) -> bool:
        names = [f"{_MODEL}.{copy}" for copy in copies]
        if any(self._contents.entry(name) is None for name in names):
            return False
        first, *others = self._contents.tensors(names)
        return all(first.dtype == other.dtype and torch.equal(first, other) for other in others)

    def saved_keys(self, keys: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Return the keys under which the checkpoint has the state of parameters."""
        return {parameter: self._found(key, self.options.options) or key for parameter, key in keys.items()}

    def state_entry(self, key: str, name: str) -> Any:  # noqa: ANN401  # what `room_for_state` takes
        """Return what the checkpoint says of a state of a parameter."""
        full = f"{_STATE}.{key}.{name}"
        if full not in self._contents and f"{full}.#document" not in self._contents:
            self.problems.append(f"{full} is not in it, though the parameter had such a state")
        return self._contents.entry(full)

    def add_optimizer(self, stage: int, optimizer: Optimizer, keys: Mapping[nn.Parameter, str]) -> None:
        """Plan what the optimizer of a stage gets, and note which parameters are trained now and were not, or the other way."""
        saved_keys = self.saved_keys(keys)
        self.problems += state_problems(optimizer, saved_keys, self.options)
        groups = [[saved_keys[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        record = self.records.get(str(stage))
        self.is_as_before.append(
            record is not None and [list(each["parameters"]) for each in record["groups"]] == groups
        )
        self.others.append(self._others(record if record is not None and self.is_as_before[-1] else None, optimizer))
        here = {key for group in groups for key in group}
        fresh = here - self.options.options.keys()
        self._tell("trained now, and not before; they start without state of the optimizer", fresh)
        frozen = (set(saved_keys.values()) & self.options.options.keys()) - here
        self._tell("trained before, and not now; their state of the optimizer is left out", frozen)

    def _others(self, own: OptimizerRecord | None, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return what an optimizer has beside state of parameters: its own, or what all have."""
        if own is not None:
            return own["others"]
        kind = type(optimizer).__qualname__
        all_others = [record["others"] for record in self.records.values() if record["kind"] == kind]
        if not all(equal_values(all_others[0], others) for others in all_others):
            names = sorted({name for others in all_others for name in others})
            self.problems.append(
                f"the optimizers of the stages differ there in {', '.join(names)}, so it is not known how those of other stages "
                f"go on: cut the model into the same stages"
            )
        return all_others[0] if all_others else {}

    def _tell(self, what: str, names: Collection[str]) -> None:
        if names:
            self.told.append(f"{what}: {_listed(names)}")

    def refuse_problems(self) -> None:
        """Raise what is wrong."""
        if self._of_other_stages:
            self.problems.append(
                f"the pipeline ranks of the job that wrote it host stages {self._saved_cut}, those of this job {self._cut}, "
                f"and these names mean different tensors in different stages: {_listed(self._of_other_stages)}. Set "
                f"mesh.pipeline_parallel and trainer.pipelining.schedule as they were, or name modules as in the whole model"
            )
        if self.problems:
            lines = "".join(f"\n- {problem}" for problem in self.problems)
            raise ValueError(f"cannot resume from the checkpoint {self._contents.path}:{lines}")

    def may_be_left(self, key: str) -> bool:
        """Tell whether it is right that no rank asks for something."""
        if key.startswith((f"{_RECORDS}.", "lr_scheduler.", "cut.")):
            return True  # read before, or there to be read by people
        if self._allows_changes and key.startswith((f"{_MODEL}.", f"{_STATE}.")):
            return True
        if key.startswith(f"{_MODEL}."):
            # Another name of a weight, or a copy of a table, which have been found to be equal.
            name = key.removeprefix(f"{_MODEL}.")
            return _OF_STAGE.sub("", name) in self._tables if _OF_STAGE.match(name) else name in self._known
        of_state = self._key_of_state.get(key.partition(".#")[0])
        return of_state is not None and of_state in self._known


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_NUM_NAMED]
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(shown)}{more}"
