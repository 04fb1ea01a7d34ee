"""Which implementation of attention to use."""

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field

from d9d.core.config import Config


class EagerSdpaBackendConfig(Config):
    """Plain tensor operations: runs anywhere, and holds all attention weights in memory."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["eager"] = "eager"


class TorchSdpaBackendType(StrEnum):
    """The kernels behind `torch.nn.functional.scaled_dot_product_attention`."""

    MATH = "MATH"
    """Plain operations."""
    FLASH_ATTENTION = "FLASH_ATTENTION"
    """FlashAttention: no masks but the causal one."""
    EFFICIENT_ATTENTION = "EFFICIENT_ATTENTION"
    """Memory-efficient attention."""
    CUDNN_ATTENTION = "CUDNN_ATTENTION"
    """cuDNN's."""


class TorchSdpaBackendConfig(Config):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["torch"] = "torch"

    backends: list[TorchSdpaBackendType] | None = Field(default=None, min_length=1)
    """Kernels it may choose from. By default all, since which can run depends on shapes, dtypes and the device."""


class FlashAttention2SdpaBackendConfig(Config):
    """The kernels of the package flash-attn: 16 bits, no masks but the causal one and windows, no sinks."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["flash_attention_2"] = "flash_attention_2"


class FlashAttention4SdpaBackendConfig(Config):
    """The kernels of the package flash-attn-4: 16 bits, no masks but the causal one and windows."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["flash_attention_4"] = "flash_attention_4"


AnySdpaBackendConfig: TypeAlias = Annotated[
    EagerSdpaBackendConfig
    | TorchSdpaBackendConfig
    | FlashAttention2SdpaBackendConfig
    | FlashAttention4SdpaBackendConfig,
    Field(discriminator="kind"),
]
"""One implementation of attention."""
