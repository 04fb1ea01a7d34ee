"""The optimizer of a stage from a config."""

from typing import Annotated, Literal, TypeAlias, assert_never

import torch
from pydantic import Field
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices  # pyright: ignore[reportPrivateUsage]

from d9d.core.config import Config
from d9d.loop.control import InitializeOptimizerStageContext, OptimizerProvider
from d9d.optim.stochastic import StochasticAdamW

__all__ = [
    "AdamOptimizerConfig",
    "AdamWOptimizerConfig",
    "AutoOptimizerConfig",
    "AutoOptimizerProvider",
    "SGDOptimizerConfig",
    "StochasticAdamWOptimizerConfig",
]

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a running average, per step."""


class StochasticAdamWOptimizerConfig(Config):
    """Sets AdamW that writes bfloat16 parameters with stochastic rounding."""

    name: Literal["stochastic_adamw"] = "stochastic_adamw"
    lr: float = Field(ge=0, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay rates of the two moments.")
    eps: float = Field(default=1e-8, ge=0, description="Added to the denominator.")
    weight_decay: float = Field(default=1e-2, ge=0, description="Decoupled weight decay, times the learning rate.")
    state_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Dtype of the two moments.")


class AdamWOptimizerConfig(Config):
    """Sets `torch.optim.AdamW`. Defaults are those of PyTorch."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(ge=0, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay rates of the two moments.")
    eps: float = Field(default=1e-8, ge=0, description="Added to the denominator.")
    weight_decay: float = Field(default=1e-2, ge=0, description="Decoupled weight decay, times the learning rate.")
    amsgrad: bool = Field(default=False, description="Divide by the largest second moment so far.")
    maximize: bool = Field(default=False, description="Step along the gradient instead of against it.")


class AdamOptimizerConfig(Config):
    """Sets `torch.optim.Adam`. Defaults are those of PyTorch."""

    name: Literal["adam"] = "adam"
    lr: float = Field(ge=0, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay rates of the two moments.")
    eps: float = Field(default=1e-8, ge=0, description="Added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, or weight decay if decoupled.")
    decoupled_weight_decay: bool = Field(default=False, description="Decay weights as AdamW does.")
    amsgrad: bool = Field(default=False, description="Divide by the largest second moment so far.")
    maximize: bool = Field(default=False, description="Step along the gradient instead of against it.")


class SGDOptimizerConfig(Config):
    """Sets `torch.optim.SGD`. Defaults are those of PyTorch."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(ge=0, description="Learning rate.")
    momentum: float = Field(default=0.0, ge=0, description="Share of the last update that carries on.")
    dampening: float = Field(default=0.0, description="Share of the gradient that momentum leaves out.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty.")
    nesterov: bool = Field(default=False, description="Nesterov momentum; needs momentum and no dampening.")
    maximize: bool = Field(default=False, description="Step along the gradient instead of against it.")


AutoOptimizerConfig: TypeAlias = Annotated[
    StochasticAdamWOptimizerConfig | AdamWOptimizerConfig | AdamOptimizerConfig | SGDOptimizerConfig,
    Field(discriminator="name"),
]
"""Any optimizer, chosen by its `name` field."""


class AutoOptimizerProvider(OptimizerProvider):
    """Builds an optimizer of all trainable parameters in one group, fused where the device has such kernels.

    SGD with momentum is never fused: its parameters may get their first gradients in different steps.

    Args:
        config: Optimizer and its hyperparameters.
    """

    def __init__(self, config: AutoOptimizerConfig) -> None:
        self._config = config

    def __call__(self, context: InitializeOptimizerStageContext) -> Optimizer:
        """Build the optimizer of one stage.

        Raises:
            ValueError: Nothing in the stage is trainable, or the optimizer is not for the dtype of a parameter.
        """
        params = [param for param in context.model.parameters() if param.requires_grad]
        if not params:
            raise ValueError(
                f"{type(context.model).__name__} has no parameter that requires a gradient: there is nothing to train."
            )
        return _build(self._config, params, fused=_supports_fused(params))


def _supports_fused(params: list[nn.Parameter]) -> bool:
    devices = _get_fused_kernels_supported_devices()
    return all(param.device.type in devices and torch.is_floating_point(param) for param in params)


def _build(config: AutoOptimizerConfig, params: list[nn.Parameter], fused: bool) -> Optimizer:
    match config:
        case AdamWOptimizerConfig():
            return AdamW(params, **config.model_dump(exclude={"name"}), fused=fused)
        case AdamOptimizerConfig():
            return Adam(params, **config.model_dump(exclude={"name"}), fused=fused)
        case SGDOptimizerConfig():
            # The fused step fails where some parameters have a momentum and others have none yet, such as those that are
            # unfrozen by a later job (torch 2.13). Left to choose, torch takes foreach operations on accelerators.
            return SGD(params, **config.model_dump(exclude={"name"}), fused=None if config.momentum else fused)
        case StochasticAdamWOptimizerConfig():
            state_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.state_dtype]
            return StochasticAdamW(
                params, **config.model_dump(exclude={"name", "state_dtype"}), state_dtype=state_dtype
            )
        case _:
            assert_never(config)
