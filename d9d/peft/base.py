"""The contract of a fine-tuning method, and how one is applied to a model."""

import abc
import dataclasses
import logging
import re
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel
from torch import nn

from d9d.core.fsdp_internals import fsdp_units, show_shards
from d9d.core.module_names import nearest
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel

__all__ = ["PeftInjectionResult", "PeftMethod", "inject_peft_and_freeze", "matching_modules", "merge_peft"]

TConfig = TypeVar("TConfig", bound=BaseModel)

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class PeftInjectionResult:
    """What a method has done to a module.

    Attributes:
        parameters_to_train: Parameters that train; all others stay frozen.
        load_state_mappers: For each tensor that was in the module before and has another name now, the mapper from its old
            name to the new one. Tensors that are new have none.
    """

    parameters_to_train: list[nn.Parameter]
    load_state_mappers: list[ModelStateMapper]


class PeftMethod(abc.ABC, Generic[TConfig]):
    """Changes a model so that a part of it can be trained, and puts what was trained into its ordinary weights."""

    @abc.abstractmethod
    def inject(self, module: nn.Module) -> PeftInjectionResult:
        """Change a module, in place. Does not touch `requires_grad`: see `inject_peft_and_freeze`.

        Args:
            module: The model, or one pipeline stage of it.
        """

    @abc.abstractmethod
    def merge(self, module: nn.Module) -> None:
        """Put what `inject` has added into the ordinary weights, and take it away, in place.

        Args:
            module: A module that `inject` has changed.
        """

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: TConfig) -> Self:
        """Build the method that a config describes."""


# Any: methods of all configs.
def inject_peft_and_freeze(method: PeftMethod[Any], module: nn.Module) -> ModelStateMapper:
    """Apply a method to a model, in place, and freeze all that it does not train.

    Before the model is distributed, or after, see `d9d.peft.lora.LoRA`.

    Args:
        method: The method.
        module: The model, or one pipeline stage of it; on the meta device or with values.

    Returns:
        The mapper from the names that a model state has to those that the module has now, for the tensors whose names have
        changed. Put behind another mapper in a `ModelStateMapperSequential`, it lets all others pass.
    """
    # Behind a forward pass FSDP may show what it has gathered for it, which is not what the optimizer will see.
    show_shards(fsdp_units(module))
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    result = method.inject(module)
    for parameter in result.parameters_to_train:
        parameter.requires_grad_(True)
    return ModelStateMapperParallel(result.load_state_mappers)


# Any: methods of all configs.
def merge_peft(method: PeftMethod[Any], module: nn.Module) -> None:
    """Put what was trained into the ordinary weights of a model, whose structure is that of before `inject` again.

    To export while training goes on, use `d9d.peft.lora.mapper_to_merged` instead, which changes nothing.

    Args:
        method: The method that was applied.
        module: The model. If it is distributed, all ranks of its meshes must call this.
    """
    method.merge(module)


def matching_modules(module: nn.Module, pattern: re.Pattern[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules below a module whose whole names a pattern matches; one that has several names by each of them.

    If there are none, a warning says so: a stage of a pipeline may have none of the modules, but it may be a misspelling too.
    """
    named = [(name, child) for name, child in module.named_modules(remove_duplicate=False) if name]
    found = [(name, child) for name, child in named if pattern.fullmatch(name)]
    if not found:
        _LOGGER.warning(
            "module_name_pattern %r matches no module here, so that nothing is trained by it%s. That is right only for a "
            "pipeline stage without such modules.",
            pattern.pattern,
            nearest(pattern.pattern, [name for name, _ in named]),
        )
    return found
