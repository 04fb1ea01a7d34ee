"""Names of a model's tensors that do not depend on how the model is cut into pipeline stages.

[Note: keys of tensors]
A checkpoint holds each tensor under a key. Where stages name their layers as in the whole model (``layers.7.mlp.weight``), the
key is the name, so that any other cut finds it. A name that several stages have for different tensors is one of their own, as
``layers.0`` of stages that count their layers from 0: its key tells the stage, and only the same number of stages finds it.
So do the keys of all parameters of a stage that has such a parameter, since a name that happens to be in one stage only
(``layers.2`` of stages with 3 layers and 1) is in another one after another cut, and means another layer there.
A weight with several names, within a stage or as copies that stages tie, has one key: its first name in its lowest stage. Its
other names are kept as aliases, since they may be the key in the checkpoint of another cut.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from d9d.core.dist_ops import all_gather_object
from d9d.pipelining.api import DeclaresTiedParameters

__all__ = ["SavedNames", "StageTensor", "agree_on_names", "stage_key"]


class StageTensor(NamedTuple):
    """An entry of a stage's state dict."""

    names: tuple[str, ...]
    """All its names in the stage, the first one first."""
    is_parameter: bool
    tie: str | None = None
    """Key of the tie with other stages, if it is in one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedNames:
    """The keys of the tensors of all stages. See [Note: keys of tensors]."""

    stages: tuple[int, ...]
    """Stages of this rank, in stage order."""
    keys: tuple[Mapping[str, str], ...]
    """Key by name, for each of these stages."""
    aliases: Mapping[str, tuple[str, ...]]
    """Other keys of the same weight, by key. Over all stages, as are the rest."""
    parameters: frozenset[str]
    """Keys of parameters."""
    others: frozenset[str]
    """Keys of all other entries."""
    num_stages: int
    """How many stages there are."""

    @classmethod
    def of_stages(cls, own: Sequence[int], tensors: Mapping[int, Sequence[StageTensor]]) -> "SavedNames":
        """Decide on the keys. Pure, and the same on all ranks.

        Args:
            own: Stages of this rank.
            tensors: Entries of all stages.
        """
        weights: dict[tuple[object, ...], list[tuple[int, str]]] = {}
        parameters: set[tuple[object, ...]] = set()
        for stage in sorted(tensors):
            for tensor in tensors[stage]:
                weight = (stage, tensor.names[0]) if tensor.tie is None else (tensor.tie,)
                weights.setdefault(weight, []).extend((stage, name) for name in tensor.names)
                if tensor.is_parameter:
                    parameters.add(weight)
        owners: dict[str, set[tuple[object, ...]]] = {}
        for weight, names in weights.items():
            for _, name in names:
                owners.setdefault(name, set()).add(weight)
        with_own_names = {stage for weight in parameters for stage, name in weights[weight] if len(owners[name]) > 1}
        keys: dict[int, dict[str, str]] = {stage: {} for stage in tensors}
        aliases: dict[str, tuple[str, ...]] = {}
        key_of: dict[tuple[object, ...], str] = {}
        for weight, names in weights.items():
            is_parameter = weight in parameters
            all_keys = dict.fromkeys(
                stage_key(stage, name) if len(owners[name]) > 1 or (is_parameter and stage in with_own_names) else name
                for stage, name in names
            )
            key_of[weight], *others = all_keys
            aliases[key_of[weight]] = tuple(others)
            for stage, name in names:
                keys[stage][name] = key_of[weight]
        return cls(
            stages=tuple(own),
            keys=tuple(keys[stage] for stage in own),
            aliases=aliases,
            parameters=frozenset(key_of[weight] for weight in parameters),
            others=frozenset(key for weight, key in key_of.items() if weight not in parameters),
            num_stages=len(tensors),
        )

    def key_of_parameters(self, modules: Sequence[nn.Module]) -> list[dict[nn.Parameter, str]]:
        """Return the keys of the parameters of each stage of this rank. Not collective.

        Args:
            modules: The stages of this rank.
        """
        return [
            {parameter: keys[name] for name, parameter in module.named_parameters()}
            for module, keys in zip(modules, self.keys, strict=True)
        ]


def stage_key(stage: int, name: str) -> str:
    """Return the key of a tensor whose name means another one in another stage."""
    return f"stage {stage}: {name}"


def agree_on_names(modules: Sequence[nn.Module], stages: Sequence[int], group: dist.ProcessGroup | None) -> SavedNames:
    """Decide on the keys of all tensors of a pipeline. All of its ranks must call it; blocks the host.

    Args:
        modules: Stages of this rank, as they will be saved.
        stages: Their indices in the pipeline.
        group: Ranks of the pipeline; None without one.
    """
    own = {stage: _tensors_of(module) for module, stage in zip(modules, stages, strict=True)}
    gathered = [own] if group is None else all_gather_object(own, group)
    return SavedNames.of_stages(stages, {stage: found for of_rank in gathered for stage, found in of_rank.items()})


def _tensors_of(module: nn.Module) -> list[StageTensor]:
    ties = module.tied_parameters() if isinstance(module, DeclaresTiedParameters) else {}
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    found = [
        StageTensor(tuple(names), is_parameter=True, tie=next((ties[name] for name in names if name in ties), None))
        for names in names_of.values()
    ]
    known = {name for tensor in found for name in tensor.names}
    return found + [StageTensor((name,), is_parameter=False) for name in module.state_dict() if name not in known]
