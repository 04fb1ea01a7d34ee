"""Build the implementation of attention that a config names."""

import os
from typing import Final, Protocol, assert_never

import torch
from pydantic import TypeAdapter, ValidationError

from .config import (
    AnySdpaBackendConfig,
    EagerSdpaBackendConfig,
    FlashAttention2SdpaBackendConfig,
    FlashAttention4SdpaBackendConfig,
    TorchSdpaBackendConfig,
)
from .eager import EagerSdpaBackend
from .flash import FlashAttention2SdpaBackend, FlashAttention4SdpaBackend
from .parameters import SdpaParameters
from .torch_kernels import TorchSdpaBackend

AUTO_SDPA_VARIABLE: Final = "D9D_BACKEND_AUTO_SDPA"
"""Environment variable with the kind of implementation for layers that name none, e.g. ``eager``."""

_CONFIG_ADAPTER: TypeAdapter[AnySdpaBackendConfig] = TypeAdapter(AnySdpaBackendConfig)


class SdpaBackend(Protocol):
    """Scaled dot product attention. An implementation with sinks is a module that holds them."""

    def __call__(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Compute attention.

        A query that may see no key gets zeros, and no gradient. If there are fewer queries than keys, they are the
        last ones.

        Shapes:
            Queries ``(B, Hq, Tq, D)``, keys ``(B, Hk, Tk, D)``, values ``(B, Hk, Tk, Dv)``; result
            ``(B, Hq, Tq, Dv)``. The mask has four axes and broadcasts to ``(B, Hq, Tq, Tk)``. Head h of the queries uses key head
            ``h // (Hq // Hk)``.

        Args:
            query_states: Queries.
            key_states: Keys.
            value_states: Values.
            attention_mask: True where a key may be seen, or a floating point term for the logits; None for neither.
            is_causal: Whether queries see no later keys; in addition to the mask.
            scale: Factor on the products of queries and keys.

        Raises:
            ValueError: If query heads can not share key heads evenly, there are more or fewer sinks than heads, or the
                mask holds integers or has not four axes.
        """
        ...


def build_sdpa_backend(params: SdpaParameters, backend_config: AnySdpaBackendConfig | None) -> SdpaBackend:
    """Build an implementation of attention.

    Args:
        params: Properties of the layer.
        backend_config: Which one. None takes the kind that the environment variable ``D9D_BACKEND_AUTO_SDPA`` names, or
            torch's, which runs on every device.

    Raises:
        ImportError: If it needs a package that is not installed.
        NotImplementedError: If it can not do what the layer asks for.
        ValueError: If the environment variable names no kind.
    """
    config = _automatic_config() if backend_config is None else backend_config
    match config:
        case EagerSdpaBackendConfig():
            return EagerSdpaBackend(params)
        case TorchSdpaBackendConfig():
            return TorchSdpaBackend(params, config.backends)
        case FlashAttention2SdpaBackendConfig():
            return FlashAttention2SdpaBackend(params)
        case FlashAttention4SdpaBackendConfig():
            return FlashAttention4SdpaBackend(params)
        case _:
            assert_never(config)


def _automatic_config() -> AnySdpaBackendConfig:
    kind = os.environ.get(AUTO_SDPA_VARIABLE, "torch")
    try:
        return _CONFIG_ADAPTER.validate_python({"kind": kind})
    except ValidationError as error:
        raise ValueError(
            f"{AUTO_SDPA_VARIABLE}={kind} names no implementation of attention. "
            "Set it to eager, torch, flash_attention_2 or flash_attention_4, or unset it."
        ) from error
