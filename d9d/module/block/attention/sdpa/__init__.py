"""Scaled dot product attention, behind one interface with several implementations."""

from .config import (
    AnySdpaBackendConfig,
    EagerSdpaBackendConfig,
    FlashAttention2SdpaBackendConfig,
    FlashAttention4SdpaBackendConfig,
    TorchSdpaBackendConfig,
    TorchSdpaBackendType,
)
from .factory import SdpaBackend, build_sdpa_backend
from .parameters import SdpaParameters

__all__ = [
    "AnySdpaBackendConfig",
    "EagerSdpaBackendConfig",
    "FlashAttention2SdpaBackendConfig",
    "FlashAttention4SdpaBackendConfig",
    "SdpaBackend",
    "SdpaParameters",
    "TorchSdpaBackendConfig",
    "TorchSdpaBackendType",
    "build_sdpa_backend",
]
