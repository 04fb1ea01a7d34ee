"""All fine-tuning methods by config, and several of them at once."""

from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, assert_never, cast

from pydantic import Field
from torch import nn

from d9d.core.config import Config

from .base import PeftInjectionResult, PeftMethod
from .full_tune import FullTune, FullTuneConfig
from .lora import LoRA, LoRAConfig

__all__ = ["AnyPeftConfig", "PeftStack", "PeftStackConfig", "peft_method_from_config"]


class PeftStackConfig(Config):
    """Applies several methods, one after the other."""

    kind: Literal["stack"] = "stack"
    methods: list["AnyPeftConfig"]
    """The methods. A later one sees the names of modules that an earlier one has left."""


AnyPeftConfig: TypeAlias = Annotated[LoRAConfig | FullTuneConfig | PeftStackConfig, Field(discriminator="kind")]
"""Any fine-tuning method, chosen by its `kind` field."""

TConfig = TypeVar("TConfig", bound=LoRAConfig | FullTuneConfig | PeftStackConfig)


class PeftStack(PeftMethod[PeftStackConfig]):
    """Applies several methods, one after the other.

    Args:
        methods: The methods.
    """

    # Any: methods of all configs.
    def __init__(self, methods: list[PeftMethod[Any]]) -> None:
        self._methods = methods

    def inject(self, module: nn.Module) -> PeftInjectionResult:
        """Apply the methods in their order."""
        results = [method.inject(module) for method in self._methods]
        return PeftInjectionResult(
            parameters_to_train=list(dict.fromkeys(each for result in results for each in result.parameters_to_train)),
            load_state_mappers=[mapper for result in results for mapper in result.load_state_mappers],
        )

    def merge(self, module: nn.Module) -> None:
        """Undo the methods, the last one first."""
        for method in reversed(self._methods):
            method.merge(module)

    @classmethod
    def from_config(cls, config: PeftStackConfig) -> Self:
        """Build the methods that a config describes."""
        return cls([peft_method_from_config(each) for each in config.methods])


def peft_method_from_config(config: TConfig) -> PeftMethod[TConfig]:
    """Build the method that a config describes.

    Args:
        config: Config of a method, or of a stack of them.
    """
    # The kind of the method follows from that of the config, which a type checker does not see.
    return cast("PeftMethod[TConfig]", _build(config))


# Any: methods of all configs.
def _build(config: LoRAConfig | FullTuneConfig | PeftStackConfig) -> PeftMethod[Any]:
    match config:
        case LoRAConfig():
            return LoRA.from_config(config)
        case FullTuneConfig():
            return FullTune.from_config(config)
        case PeftStackConfig():
            return PeftStack.from_config(config)
        case _:
            assert_never(config)
