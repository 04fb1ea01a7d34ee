"""Multiply the tokens of each expert with its matrix.

Axes: S slots (pairs of a token and one of its experts, sorted by expert), E experts, I inputs, O outputs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias, assert_never, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.module.block.optional_kernels import import_kernel

AUTO_GROUPED_MM_VARIABLE: Final = "D9D_BACKEND_AUTO_GROUPED_MM"
"""Environment variable with the kind of implementation for layers that name none, e.g. ``eager``."""

_ALIGNMENT_BYTES: Final = 16
_KERNEL_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class EagerGroupedMmBackendConfig(BaseModel):
    """One matrix product per expert: runs anywhere, in any dtype; the host waits for the sizes of the groups."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["eager"] = "eager"


class TorchGroupedMmBackendConfig(BaseModel):
    """`torch.nn.functional.grouped_mm`: one kernel, of which the host does not know the sizes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["torch"] = "torch"


class QuackGroupedMmBackendConfig(BaseModel):
    """The kernels of the package quack-kernels: 16 bits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["quack"] = "quack"


class GroupedGemmBackendConfig(BaseModel):
    """The kernels of the package nv-grouped-gemm: bfloat16; the host waits for the sizes of the groups."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        counts: list[int] = groups.host_counts().tolist()
        if len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
            raise ValueError(
                f"there are {weight.shape[0]} matrices and {x.shape[0]} rows, but groups of {counts} "
                f"({len(counts)} groups, {sum(counts)} rows). Pass one count per matrix."
            )
        # An empty product too: it makes a gradient of zero and not none.
        parts = [rows @ matrix for rows, matrix in zip(x.split(counts), weight.unbind(0), strict=True)]
        return torch.cat(parts)


class TorchGroupedMm:
    """`torch.nn.functional.grouped_mm`.

    Args:
        params: Sizes, whose rows the kernel wants aligned.
    """

    def __init__(self, params: GroupedMmParameters) -> None:
        self._params = params

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Return why the kernel can not compute in a dtype, None if it can."""
        if dtype not in _KERNEL_DTYPES:
            return f"torch's grouped matrix product computes in {[str(d) for d in _KERNEL_DTYPES]}, not in {dtype}."
        multiple = _ALIGNMENT_BYTES // dtype.itemsize
        sizes = (self._params.in_features, self._params.out_features)
        if any(size % multiple for size in sizes):
            return (
                f"torch's grouped matrix product wants sizes of a multiple of {multiple} in {dtype}, got "
                f"in_features {sizes[0]} and out_features {sizes[1]}."
            )
        return None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`.

        Raises:
            ValueError: If the kernel can not compute in the dtype, or at these sizes.
        """
        refusal = self.refusal(x.dtype)
        if refusal is not None:
            raise ValueError(f"{refusal} Use the kind eager.")
        product = F.grouped_mm(_with_plain_strides(x), weight, offs=groups.offsets)
        # Autograd functions are untyped.
        return cast(torch.Tensor, _ContiguousGradient.apply(product))


class _ContiguousGradient(torch.autograd.Function):
    """Identity. The kernel's backward pass refuses expanded gradients, such as those of a sum (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # autograd's signature
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return _with_plain_strides(grad)


def _with_plain_strides(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows if needed. `contiguous` is not enough: to it, an empty tensor is contiguous whatever its strides."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


class NvGroupedMm:
    """`grouped_gemm.ops.gmm` of the package nv-grouped-gemm; bfloat16 only.

    Raises:
        ImportError: If the package is not installed.
    """

    def __init__(self) -> None:
        kernels = import_kernel("the grouped product kind grouped_gemm", "grouped_gemm", "nv-grouped-gemm", "torch")
        self._kernel: Callable[..., torch.Tensor] = kernels.ops.gmm
        self._eager = EagerGroupedMm()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`. Blocks the host until the counts are known."""
        if x.shape[0] == 0:
            return self._eager(x, weight, groups)
        return self._kernel(x, weight, groups.host_counts().to(torch.int64))


class QuackGroupedMm:
    """`quack.gemm_interface.gemm` of the package quack-kernels; 16-bit dtypes only.

    Raises:
        ImportError: If the package is not installed.
    """

    def __init__(self) -> None:
        kernels = import_kernel("the grouped product kind quack", "quack.gemm_interface", "quack-kernels", "torch")
        self._kernel: Callable[..., torch.Tensor] = kernels.gemm
        self._eager = EagerGroupedMm()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertTokenGroups) -> torch.Tensor:
        """Multiply; see `GroupedMmBackend`."""
        if x.shape[0] == 0:
            return self._eager(x, weight, groups)
        bounds = F.pad(groups.offsets, (1, 0))  # (E + 1,), int32
        # Autograd functions are untyped.
        return cast(torch.Tensor, _QuackProduct.apply(_with_plain_strides(x), weight, bounds, self._kernel))


class _QuackProduct(torch.autograd.Function):
    """The package's own gradients are those of whole layers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # takes what is put on it
        x: torch.Tensor,
        weight: torch.Tensor,
        bounds: torch.Tensor,
        kernel: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bounds)
        ctx.kernel = kernel
        return kernel(x, weight, cu_seqlens_m=bounds)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bounds = ctx.saved_tensors
        grad = _with_plain_strides(grad)
        wants_x = ctx.needs_input_grad[0] and GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.inputs)
        wants_weight = ctx.needs_input_grad[1] and GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.weight)
        return (
            ctx.kernel(grad, weight.mT, cu_seqlens_m=bounds) if wants_x else None,
            ctx.kernel(x.T, grad, cu_seqlens_k=bounds) if wants_weight else None,
            None,
            None,
        )


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
