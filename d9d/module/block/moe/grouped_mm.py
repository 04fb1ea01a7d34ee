"""Multiply the tokens of each expert with its matrix.

Axes: S slots (pairs of a token and one of its experts, sorted by expert), E experts, I inputs, O outputs.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Protocol, TypeAlias, assert_never

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from d9d.core.config import Config
from d9d.kernel.grouped_mm import eager as eager_products
from d9d.kernel.grouped_mm import nv as nv_products
from d9d.kernel.grouped_mm import quack as quack_products
from d9d.kernel.grouped_mm import torch as torch_products

AUTO_GROUPED_MM_VARIABLE: Final = "D9D_BACKEND_AUTO_GROUPED_MM"
"""Environment variable with the kind of implementation for layers that name none, e.g. ``eager``."""


class EagerGroupedMmBackendConfig(Config):
    """One matrix product per expert: runs anywhere, in any dtype; the host waits for the sizes of the groups."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["eager"] = "eager"


class TorchGroupedMmBackendConfig(Config):
    """`torch.nn.functional.grouped_mm`: one kernel, of which the host does not know the sizes."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["torch"] = "torch"


class QuackGroupedMmBackendConfig(Config):
    """The kernels of the package quack-kernels: 16 bits."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["quack"] = "quack"


class GroupedGemmBackendConfig(Config):
    """The kernels of the package nv-grouped-gemm: bfloat16; the host waits for the sizes of the groups."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["grouped_gemm"] = "grouped_gemm"


AnyGroupedMmBackendConfig: TypeAlias = Annotated[
    EagerGroupedMmBackendConfig | TorchGroupedMmBackendConfig | QuackGroupedMmBackendConfig | GroupedGemmBackendConfig,
    Field(discriminator="kind"),
]
"""One implementation of grouped matrix products."""

_CONFIG_ADAPTER: TypeAdapter[AnyGroupedMmBackendConfig] = TypeAdapter(AnyGroupedMmBackendConfig)


class ExpertTokenGroups:
    """How many slots belong to each expert; the slots stand in the order of experts.

    Args:
        counts: ``(E,)`` integers, on the device of the tokens; zeros are allowed.
        host_counts: The same on the CPU, if the caller knows them, so that nobody has to wait for the device.
    """

    def __init__(self, counts: torch.Tensor, host_counts: torch.Tensor | None = None) -> None:
        self.counts = counts
        self._host_counts = host_counts
        self._offsets: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        """Where each group ends (exclusive), ``(E,)``, int32, on the device."""
        if self._offsets is None:
            self._offsets = self.counts.cumsum(0, dtype=torch.int32)
        return self._offsets

    def host_counts(self) -> torch.Tensor:
        """Return the counts on the CPU; the first call blocks the host if they were not given."""
        if self._host_counts is None:
            self._host_counts = self.counts.cpu()
        return self._host_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMmParameters:
    """What does not change from call to call."""

    in_features: int
    """I."""
    out_features: int
    """O."""


class GroupedMmBackend(Protocol):
    """Grouped matrix products."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply each group of rows with its matrix. Experts without slots get gradients of zero.

        Shapes:
            ``(S, I)`` and ``(E, I, O)`` to ``(S, O)``.

        Args:
            x: Rows, in the order of experts.
            weight: One matrix per expert.
            groups: How many rows each expert has; they must sum to S.
        """
        ...


class EagerGroupedMm:
    """One matrix product per expert."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`. Blocks the host until the counts are known.

        Raises:
            ValueError: If there is not one count per matrix, or the counts do not sum to the number of rows.
        """
        return eager_products.multiply(x, weight, groups.host_counts().tolist())


class TorchGroupedMm:
    """`torch.nn.functional.grouped_mm`.

    Args:
        params: Sizes, whose rows the kernel wants aligned.
    """

    def __init__(self, params: GroupedMmParameters) -> None:
        self._params = params

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Return why the kernel can not compute in a dtype, None if it can."""
        return torch_products.refusal(dtype, self._params.in_features, self._params.out_features)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`.

        Raises:
            ValueError: If the kernel can not compute in the dtype, or at these sizes.
        """
        refusal = self.refusal(x.dtype)
        if refusal is not None:
            raise ValueError(f"{refusal} Use the kind eager.")
        return torch_products.multiply(x, weight, groups.offsets)


class NvGroupedMm:
    """`grouped_gemm.ops.gmm` of the package nv-grouped-gemm; bfloat16 only.

    Raises:
        ImportError: If the package is not installed.
    """

    def __init__(self) -> None:
        self._kernel = nv_products.load_kernel()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`. Blocks the host until the counts are known."""
        return nv_products.multiply(self._kernel, x, weight, groups.host_counts())


class QuackGroupedMm:
    """`quack.gemm_interface.gemm` of the package quack-kernels; 16-bit dtypes only.

    Raises:
        ImportError: If the package is not installed.
    """

    def __init__(self) -> None:
        self._kernel = quack_products.load_kernel()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`."""
        return quack_products.multiply(self._kernel, x, weight, groups.offsets)


class AutoGroupedMm:
    """Torch's kernel on an accelerator, for the 16-bit dtypes and sizes that it takes; else a product per expert.

    Args:
        params: Sizes.
    """

    def __init__(self, params: GroupedMmParameters) -> None:
        self._torch = TorchGroupedMm(params)
        self._eager = EagerGroupedMm()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`."""
        is_fast = x.device.type != "cpu" and x.dtype.itemsize == torch.bfloat16.itemsize
        backend = self._torch if is_fast and self._torch.refusal(x.dtype) is None else self._eager
        return backend(x, weight, groups)


def build_grouped_mm_backend(
    params: GroupedMmParameters, backend_config: AnyGroupedMmBackendConfig | None
) -> GroupedMmBackend:
    """Build an implementation of grouped matrix products.

    Args:
        params: Sizes of the layer.
        backend_config: Which one. None takes the kind that the environment variable ``D9D_BACKEND_AUTO_GROUPED_MM``
            names, or chooses at each call by device and dtype.

    Raises:
        ImportError: If it needs a package that is not installed.
        ValueError: If the environment variable names no kind.
    """
    config = _config_of_environment() if backend_config is None else backend_config
    match config:
        case None:
            return AutoGroupedMm(params)
        case EagerGroupedMmBackendConfig():
            return EagerGroupedMm()
        case TorchGroupedMmBackendConfig():
            return TorchGroupedMm(params)
        case QuackGroupedMmBackendConfig():
            return QuackGroupedMm()
        case GroupedGemmBackendConfig():
            return NvGroupedMm()
        case _:
            assert_never(config)


def _config_of_environment() -> AnyGroupedMmBackendConfig | None:
    kind = os.environ.get(AUTO_GROUPED_MM_VARIABLE)
    if kind is None:
        return None
    try:
        return _CONFIG_ADAPTER.validate_python({"kind": kind})
    except ValidationError as error:
        raise ValueError(
            f"{AUTO_GROUPED_MM_VARIABLE}={kind} names no implementation of grouped products. "
            "Set it to eager, torch, quack or grouped_gemm, or unset it."
        ) from error
