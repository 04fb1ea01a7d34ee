"""Train chosen modules in full."""

from re import Pattern
from typing import Literal, Self

from torch import nn

from d9d.core.config import Config

from .base import PeftInjectionResult, PeftMethod, matching_modules

__all__ = ["FullTune", "FullTuneConfig"]


class FullTuneConfig(Config):
    """Chooses modules that train in full, such as a new head."""

    kind: Literal["full_tune"] = "full_tune"
    module_name_pattern: Pattern[str]
    """Regular expression for the whole name of a module, whose parameters train with those of all modules below it."""


class FullTune(PeftMethod[FullTuneConfig]):
    """Trains the parameters of modules as they are, and changes nothing else.

    Args:
        config: Which modules.
    """

    def __init__(self, config: FullTuneConfig) -> None:
        self._config = config

    def inject(self, module: nn.Module) -> PeftInjectionResult:
        """Choose the parameters."""
        found = matching_modules(module, self._config.module_name_pattern)
        parameters = [parameter for _, child in found for parameter in child.parameters()]
        return PeftInjectionResult(parameters_to_train=list(dict.fromkeys(parameters)), load_state_mappers=[])

    def merge(self, module: nn.Module) -> None:
        """Do nothing: the ordinary weights are what was trained."""

    @classmethod
    def from_config(cls, config: FullTuneConfig) -> Self:
        """Build the method that a config describes."""
        return cls(config)
