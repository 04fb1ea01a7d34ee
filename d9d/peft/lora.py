"""LoRA: frozen linear layers, and beside them trained products of two narrow ones.

Source: "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685
"""

from collections.abc import Sequence
from re import Pattern
from typing import Literal, Self

from torch import nn

from d9d.core.config import Config
from d9d.core.fsdp_internals import fsdp_parameters, fsdp_units, show_shards
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperIdentity, ModelStateMapperRename
from d9d.module.block.head import SplitLanguageModellingHead
from d9d.module.block.moe import GroupedLinear, TopKRouter

from .base import PeftInjectionResult, PeftMethod, matching_modules
from .lora_layers import LoRAGroupedLinear, LoRALayer, LoRALinear, LoRAParameters, adapt_layer
from .lora_layout import own_weight
from .lora_mapper import ModelStateMapperMergeLoRA

__all__ = ["LoRA", "LoRAConfig", "LoRAGroupedLinear", "LoRALinear", "LoRAParameters", "mapper_to_merged"]


_PAST_LAYERS = (
    LoRALinear,
    LoRAGroupedLinear,
    SplitLanguageModellingHead,
    TopKRouter,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
)
"""Classes that compute, at times at least, with the weights of linear layers in them past these: the last in evaluation."""


class LoRAConfig(Config):
    """Chooses the layers that get adapters."""

    kind: Literal["lora"] = "lora"
    module_name_pattern: Pattern[str]
    """Regular expression for the whole name of a module. Those that are linear layers, or those of experts, get adapters."""
    params: LoRAParameters
    """Sizes of all of these adapters."""


class LoRA(PeftMethod[LoRAConfig]):
    """Gives linear layers adapters: ``q_proj.weight`` becomes ``q_proj.base.weight``, beside ``q_proj.lora_A.weight``.

    Inject before the model is distributed, or afterwards. Then all ranks must call it, adapters get the values of one rank, and
    they are replicated where FSDP has sharded their layers.

    Args:
        config: Which layers, and sizes of their adapters.
    """

    def __init__(self, config: LoRAConfig) -> None:
        self._config = config

    def inject(self, module: nn.Module) -> PeftInjectionResult:
        """Put adapters beside layers, in place.

        Raises:
            ValueError: If the pattern matches modules of which none is a linear layer, or a part of a layer with an adapter.
            NotImplementedError: If it matches embeddings; if other code than the layer's own uses the weight, so that an adapter would not be seen; if
                another module has the same weight, which would change with it when the adapter is merged; or FSDP has
                sharded a layer that tensor parallelism has split.
        """
        found = matching_modules(module, self._config.module_name_pattern)
        layers = [(name, child) for name, child in found if isinstance(child, nn.Linear | GroupedLinear)]
        if found and not layers:
            name, child = found[0]
            raise ValueError(
                f"module_name_pattern {self._config.module_name_pattern.pattern!r} matches no linear layer, but {name}, a "
                f"{type(child).__name__}. It has to match whole names of layers, as '.*\\.(q_proj|v_proj)' does."
            )
        _refuse_embeddings(found)
        _refuse_unseen(module, layers)
        show_shards(fsdp_units(module))
        _refuse_tied(module, layers)
        sharded = _sharded_weights(module)
        _refuse_split_shards(layers, sharded)
        distinct = dict.fromkeys(layer for _, layer in layers)
        adapted = {
            layer: adapt_layer(layer, self._config.params, is_sharded=own_weight(layer) in sharded)
            for layer in distinct
        }
        for name, layer in layers:
            module.set_submodule(name, adapted[layer])
        return PeftInjectionResult(
            parameters_to_train=[own_weight(each) for a in adapted.values() for each in (a.lora_A, a.lora_B)],
            load_state_mappers=[
                ModelStateMapperRename(f"{name}.{own}", f"{name}.base.{own}")
                for name, layer in layers
                for own, _ in layer.named_parameters()
            ],
        )

    def merge(self, module: nn.Module) -> None:
        """Add the adapters to the weights of their layers, and take them away, in place.

        If weights are distributed, all ranks of their meshes must call it.
        """
        show_shards(fsdp_units(module))
        merged: dict[LoRALayer, nn.Module] = {}
        for name, layer in matching_modules(module, self._config.module_name_pattern):
            if isinstance(layer, LoRALinear | LoRAGroupedLinear):
                merged[layer] = merged[layer] if layer in merged else layer.merge_with_base_()
                module.set_submodule(name, merged[layer])

    @classmethod
    def from_config(cls, config: LoRAConfig) -> Self:
        """Build the method that a config describes."""
        return cls(config)


def mapper_to_merged(module: nn.Module) -> ModelStateMapper:
    """Return the mapper from the tensors of a model with adapters to those of the model without, with adapters added.

    For exports while training goes on. Put it before the mapper to another layout in a `ModelStateMapperSequential`.

    Args:
        module: The model, or one pipeline stage of it, also distributed. It stays as it is.
    """
    mappers: list[ModelStateMapper] = []
    merged: set[str] = set()
    for name, layer in module.named_modules(remove_duplicate=False):
        if not isinstance(layer, LoRALinear | LoRAGroupedLinear):
            continue
        factors = ("lora_B", "lora_A") if isinstance(layer, LoRALinear) else ("lora_A", "lora_B")
        mappers.append(ModelStateMapperMergeLoRA(name, factors, layer.scale))
        mappers += [
            ModelStateMapperRename(f"{name}.base.{own}", f"{name}.{own}")
            for own in layer.base.state_dict()
            if own != "weight"
        ]
        merged |= {f"{name}.{own}" for own in layer.state_dict()}
    others = [name for name in module.state_dict() if name not in merged]
    return ModelStateMapperParallel([*mappers, *map(ModelStateMapperIdentity, others)])


def _refuse_embeddings(found: Sequence[tuple[str, nn.Module]]) -> None:
    name = next((name for name, child in found if isinstance(child, nn.Embedding)), None)
    if name is not None:
        raise NotImplementedError(
            f"{name} can have no adapter: it is an embedding, and adapters are for linear layers. Leave it out of the pattern, as "
            f"'.*_proj' does, or train it in full by FullTune."
        )


def _refuse_unseen(module: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
    for owner in module.modules():
        if not isinstance(owner, _PAST_LAYERS):
            continue
        name = next((name for name, layer in layers if any(layer is child for child in owner.modules())), None)
        if name is None:
            continue
        if isinstance(owner, LoRALinear | LoRAGroupedLinear):
            raise ValueError(f"{name} is a part of a layer that has an adapter already. Let the pattern leave it out.")
        raise NotImplementedError(
            f"{name} can have no adapter: {type(owner).__name__} computes with its weight past the layer. Leave it out of "
            f"the pattern, or train it in full by FullTune."
        )


def _refuse_tied(module: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
    weights = {own_weight(layer): (name, layer) for name, layer in layers}
    for owner_name, owner in module.named_modules():
        for parameter in owner.parameters(recurse=False):
            name, layer = weights.get(parameter, (owner_name, owner))
            if owner is not layer:
                raise NotImplementedError(
                    f"{name} can have no adapter: its weight is that of {owner_name or type(owner).__name__} too, which "
                    f"would change with it when the adapter is merged. Untie the two first, or train it in full by FullTune."
                )


def _sharded_weights(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return the parameters that FSDP holds, and of each whether it was distributed before."""
    return {
        parameter.sharded_param: parameter.is_dtensor
        for unit in fsdp_units(module)
        for parameter in fsdp_parameters(unit)
    }


def _refuse_split_shards(layers: Sequence[tuple[str, nn.Module]], sharded: dict[nn.Parameter, bool]) -> None:
    names = [name for name, layer in layers if sharded.get(own_weight(layer))]
    if names:
        raise NotImplementedError(
            f"{names[0]} is split by tensor parallelism and sharded by FSDP, so that an adapter can not be put beside it any "
            f"more. Inject adapters before the model is distributed, or between the two."
        )
