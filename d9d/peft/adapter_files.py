"""Adapters alone, in the files of the package ``peft``."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from safetensors.torch import save
from torch import nn

from d9d.model_state.io.durable import json_bytes, write_durably
from d9d.model_state.io.source import open_model_state
from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.base import ordered_groups
from d9d.model_state.mapper.compose import (
    ModelStateMapperParallel,
    ModelStateMapperPrefixScope,
    ModelStateMapperSelectGroups,
)
from d9d.model_state.mapper.leaf import ModelStateMapperRename
from d9d.model_state.mapper.pieces import TensorPieces
from d9d.module.block.moe import GroupedLinear
from d9d.module.model.heads import SINGLE_HEAD_PREFIX
from d9d.pipelining.api import DeclaresTiedParameters

from .all import AnyPeftConfig, PeftStackConfig
from .lora import LoRAConfig, LoRAParameters
from .lora_layers import LoRAGroupedLinear, LoRALinear

__all__ = ["mapper_to_adapters", "write_peft_adapter"]

_PREFIX = "base_model.model."
"""What the package puts before names of the model's own modules."""
_FACTORS = ("lora_A.weight", "lora_B.weight")


def mapper_to_adapters(module: nn.Module, to_huggingface: ModelStateMapper) -> ModelStateMapper:
    """Return the mapper from a model with adapters to what trains of it, under the names of the package ``peft``.

    These are adapters, and modules that train in full; buffers are left out. For exports while training goes on; `write_peft_adapter` makes a folder
    of the export that the package reads.

    Args:
        module: The model, or one pipeline stage of it, also distributed. It stays as it is.
        to_huggingface: The mapper of the same model without adapters to the names of ``transformers``; that of the stage knows
            no names of others, to which those of modules that train in full are compared. Of layers with adapters it must be
            able to `trace` the weights.

    Raises:
        NotImplementedError: If something trains that such files can not hold, by its name.
    """
    adapted = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoRALinear)}
    _refuse_others(module)
    groups = {name: group for group in to_huggingface.state_dependency_groups() for name in group.inputs}
    renames = [rename for name, layer in adapted.items() for rename in _renames(name, layer, to_huggingface, groups)]
    return ModelStateMapperParallel([*renames, _map_whole(module, adapted, to_huggingface)])


def write_peft_adapter(
    src_dir: Path | str, dest_dir: Path | str, config: AnyPeftConfig, base_model: str | None = None
) -> None:
    """Write the folder of an adapter, as ``PeftModel.from_pretrained`` reads it. For one rank only. Blocks the host.

    Args:
        src_dir: An export through `mapper_to_adapters`, of the whole model.
        dest_dir: Gets ``adapter_model.safetensors`` and ``adapter_config.json``; it is created.
        config: The method that was injected.
        base_model: Name or folder of the model without adapters, for those who load the adapter by its name alone.

    Raises:
        ValueError: If the export is not of this method.
        NotImplementedError: If there are adapters of several sizes.
        OSError: Naming the path that can not be read or written.
    """
    params = _params_of(config)
    with open_model_state(src_dir) as source:
        tensors = {name: source.read(name).clone() for name in source.tensors}
    owners = {name: name.removeprefix(_PREFIX).rpartition(".")[0] for name in tensors}
    adapters = {name: owners[name].rpartition(".")[0] for name in tensors if name.endswith(_FACTORS)}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}
    ranks = {len(tensor) for name, tensor in tensors.items() if name.endswith(_FACTORS[0])}
    if others or ranks != {params.r}:
        raise ValueError(
            f"{src_dir} holds {', '.join(sorted(others)[:3]) or f'adapters of the widths {sorted(ranks)}'}, which is no export "
            f"of adapters with r = {params.r}. Export through mapper_to_adapters, and pass the config that was injected."
        )
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": params.r,
        "lora_alpha": params.alpha,
        "lora_dropout": params.dropout,
        "bias": "none",
        "target_modules": sorted(set(adapters.values())),
        "modules_to_save": sorted({owners[name] for name in tensors.keys() - adapters.keys()}) or None,
        "inference_mode": True,
    }
    folder = Path(dest_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
    write_durably(folder / "adapter_config.json", json_bytes(described))


def _refuse_others(module: nn.Module) -> None:
    """Refuse what trains and has no place in such files."""
    tied = module.tied_parameters() if isinstance(module, DeclaresTiedParameters) else {}
    for name, owner in module.named_modules():
        own = [key for key, parameter in owner.named_parameters(recurse=False) if parameter.requires_grad]
        if isinstance(owner, LoRAGroupedLinear) or (own and isinstance(owner, GroupedLinear)):
            raise _unwritable(name, "holds all experts of a layer, which transformers does not have as modules")
        if isinstance(owner, LoRALinear) and any(each.requires_grad for each in owner.base.parameters()):
            raise _unwritable(name, "trains in full beside its adapter")
        if any(f"{name}.{key}" in tied for key in own):
            raise _unwritable(name, "has the weight of another module, which such files would tear apart")
        if any(key not in ("weight", "bias") for key in own):
            raise _unwritable(name, "has trained parameters beside a weight and a bias")


def _unwritable(name: str, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} {reason}: the files of an adapter can not hold it. Export merged weights by mapper_to_merged, or train others."
    )


def _renames(
    name: str, layer: LoRALinear, to_huggingface: ModelStateMapper, groups: Mapping[str, StateGroup]
) -> Iterator[ModelStateMapper]:
    weight = f"{name}.weight"
    group = groups.get(weight)
    if group is None or len(group.inputs) > 1 or not _is_unchanged(to_huggingface, weight, layer):
        raise _unwritable(name, f"is no linear layer by itself there ({group or 'it is not mapped'})")
    (theirs,) = group.outputs
    _refuse_unknown(name, theirs)
    for factor in _FACTORS:
        yield ModelStateMapperRename(f"{name}.{factor}", f"{_PREFIX}{theirs.removesuffix('weight')}{factor}")


def _is_unchanged(mapper: ModelStateMapper, weight: str, layer: LoRALinear) -> bool:
    """Tell whether a weight has another name there, but the same rows and columns."""
    shape = (layer.out_features, layer.in_features)
    traced = mapper.trace({weight: TensorPieces.whole(weight, shape, layer.base.weight.dtype)})
    outputs = [] if traced is None else list(traced.values())
    return [each.shape for each in outputs] == [shape] and all(
        piece.source == weight and piece.source_box == piece.box and piece.dims == (0, 1) for piece in outputs[0].pieces
    )


def _map_whole(
    module: nn.Module, adapted: Mapping[str, nn.Module], to_huggingface: ModelStateMapper
) -> ModelStateMapper:
    """Map modules that train in full."""
    inside = tuple(f"{name}." for name in adapted)
    trained = {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not name.startswith(inside)
    }
    mapped = ordered_groups(to_huggingface.state_dependency_groups())
    groups = [group for group in mapped if group.inputs & trained]
    unmapped = sorted(trained.difference(*(group.inputs for group in groups)))
    if unmapped:
        raise _unwritable(unmapped[0], "trains, but is not mapped")
    for group in groups:
        for theirs in sorted(group.outputs):
            _refuse_unknown(min(group.inputs), theirs)
    _refuse_ambiguous(_owners(groups), _owners(mapped))
    chosen = ModelStateMapperSelectGroups(to_huggingface, lambda group: group in groups)
    return ModelStateMapperPrefixScope(chosen, target_prefix=_PREFIX)


def _refuse_unknown(name: str, theirs: str) -> None:
    """Refuse what the package would leave out in silence."""
    if theirs.startswith(SINGLE_HEAD_PREFIX):
        raise _unwritable(name, f"is {theirs} there, which models of transformers do not have")


def _refuse_ambiguous(trained: AbstractSet[str], mapped: AbstractSet[str]) -> None:
    """Refuse modules whose names end names of others: by these ends the package looks for what trains in full (0.21.2)."""
    modules = {name for owner in mapped for name in itertools.accumulate(owner.split("."), "{}.{}".format)}
    for name in sorted(trained):
        other = next((other for other in sorted(modules - trained) if other.endswith(name)), None)
        if other is not None:
            raise _unwritable(name, f"ends the name of {other} there, which the package peft would take for it")


def _owners(groups: Iterable[StateGroup]) -> set[str]:
    """Return the modules there whose tensors are mapped."""
    return {name.rpartition(".")[0] for group in groups for name in group.outputs}


def _params_of(config: AnyPeftConfig) -> LoRAParameters:
    """Return the sizes of all adapters of a method."""
    found = list(dict.fromkeys(params.model_dump_json() for params in _adapters_of(config)))
    if len(found) != 1:
        shown = " and ".join(found) or "no adapters"
        raise NotImplementedError(
            f"the files of an adapter are written for adapters of one size, and the method has {shown}. Give all the same, or "
            f"export merged weights by mapper_to_merged."
        )
    return LoRAParameters.model_validate_json(found[0])


def _adapters_of(config: AnyPeftConfig) -> Iterator[LoRAParameters]:
    if isinstance(config, LoRAConfig):
        yield config.params
    elif isinstance(config, PeftStackConfig):
        for method in config.methods:
            yield from _adapters_of(method)
