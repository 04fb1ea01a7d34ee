"""What the tests of blocks compare with: transformers computing in fp64 throughout, and the tolerances."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

FP64 = {"rtol": 1e-10, "atol": 1e-10}  # both sides compute the same formula in fp64; sums come in another order
FP32 = {"rtol": 1e-6, "atol": 1e-6}  # a few roundings of fp32
FP32_SUMS = {"rtol": 1e-5, "atol": 1e-5}  # the same after matrix products over some dozens of terms


class EverythingInDouble(TorchFunctionMode):
    """Runs code that rounds to fp32 on purpose (norms, softmax, routers, angles) in fp64: fp32 means fp64 inside."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


def randomize(module: nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Give every parameter random values, norm weights included, which would otherwise be all ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)


def copy_parameters(source: nn.Module, target: nn.Module, names: Mapping[str, str]) -> None:
    """Copy parameters by name; `names` maps those of the source to those of the target, and must name all."""
    sources, targets = dict(source.named_parameters()), dict(target.named_parameters())
    assert set(names) == set(sources)
    assert set(names.values()) == set(targets)
    with torch.no_grad():
        for source_name, target_name in names.items():
            targets[target_name].copy_(sources[source_name])


def assert_equal_gradients(
    source: nn.Module, target: nn.Module, names: Mapping[str, str], tolerance: Mapping[str, float]
) -> None:
    sources, targets = dict(source.named_parameters()), dict(target.named_parameters())
    for source_name, target_name in names.items():
        torch.testing.assert_close(
            targets[target_name].grad, sources[source_name].grad, **tolerance, msg=lambda m, n=target_name: f"{n}: {m}"
        )
