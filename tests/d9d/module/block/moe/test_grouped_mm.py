"""Grouped products against one product per group, with empty groups, in every dtype."""

import importlib.util

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from d9d.module.block.moe import GroupedLinear, GroupedSwiGLU
from d9d.module.block.moe.grouped_mm import (
    AnyGroupedMmBackendConfig,
    EagerGroupedMmBackendConfig,
    ExpertTokenGroups,
    GroupedGemmBackendConfig,
    GroupedMmParameters,
    QuackGroupedMmBackendConfig,
    TorchGroupedMmBackendConfig,
    build_grouped_mm_backend,
)
from tests.d9d.module.block.oracles import FP32_SUMS, FP64, randomize

IN, OUT = 16, 8
COUNTS = [[3, 0, 4, 1], [0, 0, 0, 8], [2, 2, 2, 2], [0, 0, 0, 0]]
BF16_SUMS = {"rtol": 2**-6, "atol": 2**-5}  # 8 bits of mantissa over sums of 16 terms
EAGER, TORCH = EagerGroupedMmBackendConfig(), TorchGroupedMmBackendConfig()
PARAMS = GroupedMmParameters(in_features=IN, out_features=OUT)


@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [
        (EAGER, torch.float64, FP64),
        (EAGER, torch.bfloat16, BF16_SUMS),
        (TORCH, torch.float32, FP32_SUMS),
        (TORCH, torch.bfloat16, BF16_SUMS),
        (None, torch.float64, FP64),
        (None, torch.bfloat16, BF16_SUMS),
    ],
)
@pytest.mark.parametrize("counts", COUNTS)
def test_equals_one_product_per_group(config, dtype, tolerance, counts):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), IN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(4, IN, OUT, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    group_of_row = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    expected = torch.einsum("si,sio->so", x64, weight64[group_of_row])
    result = build_grouped_mm_backend(PARAMS, config)(x, weight, ExpertTokenGroups(torch.tensor(counts)))
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, **tolerance)
    # A sum, whose gradient is expanded, as well as a gradient of its own for each element.
    for loss in (lambda y: y.sum(), lambda y: (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()):
        gradients = torch.autograd.grad(loss(result), (x, weight), retain_graph=True)
        for gradient, right in zip(
            gradients, torch.autograd.grad(loss(expected), (x64, weight64), retain_graph=True), strict=True
        ):
            torch.testing.assert_close(gradient.double(), right, **tolerance)


def test_single_rows_and_foreign_strides():
    weight = torch.randn(4, IN, OUT)
    multiply = build_grouped_mm_backend(PARAMS, TORCH)
    one = torch.randn(IN, 1).T.requires_grad_()  # (1, IN), with strides of a column
    result = multiply(one, weight, ExpertTokenGroups(torch.tensor([0, 0, 1, 0])))
    torch.testing.assert_close(result, one @ weight[2], **FP32_SUMS)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), one)[0], weight[2].sum(1)[None], **FP32_SUMS)
    columns = torch.randn(IN, 8).T
    result = multiply(columns, weight, ExpertTokenGroups(torch.tensor([8, 0, 0, 0])))
    torch.testing.assert_close(result, columns @ weight[0], **FP32_SUMS)


def test_groups():
    groups = ExpertTokenGroups(torch.tensor([3, 0, 4, 1]))
    assert groups.offsets.tolist() == [3, 3, 7, 8]
    assert groups.offsets.dtype == torch.int32
    assert groups.host_counts().tolist() == [3, 0, 4, 1]
    known = torch.tensor([1, 2])
    assert ExpertTokenGroups(torch.tensor([1, 2], device="meta"), known).host_counts() is known


def test_wrong_counts_are_refused():
    x, weight = torch.randn(8, IN), torch.randn(4, IN, OUT)
    multiply = build_grouped_mm_backend(PARAMS, EAGER)
    with pytest.raises(ValueError, match=r"4 matrices and 8 rows, but groups of \[3, 5\]"):
        multiply(x, weight, ExpertTokenGroups(torch.tensor([3, 5])))
    with pytest.raises(ValueError, match="7 rows"):
        multiply(x, weight, ExpertTokenGroups(torch.tensor([3, 2, 1, 1])))


def test_what_the_kernel_can_not_compute_is_refused():
    groups = ExpertTokenGroups(torch.tensor([2]))
    with pytest.raises(ValueError, match=r"not in torch.float64. Use the kind eager"):
        build_grouped_mm_backend(PARAMS, TORCH)(torch.randn(2, IN).double(), torch.randn(1, IN, OUT).double(), groups)
    odd = GroupedMmParameters(in_features=15, out_features=8)
    with pytest.raises(ValueError, match=r"multiple of 8 in torch.bfloat16, got in_features 15"):
        build_grouped_mm_backend(odd, TORCH)(torch.randn(2, 15).bfloat16(), torch.randn(1, 15, 8).bfloat16(), groups)


def test_config_union_and_environment(monkeypatch: pytest.MonkeyPatch):
    adapter = TypeAdapter(AnyGroupedMmBackendConfig)
    for config in (EAGER, TORCH, QuackGroupedMmBackendConfig(), GroupedGemmBackendConfig()):
        assert adapter.validate_python(config.model_dump()) == config
    with pytest.raises(ValidationError):
        adapter.validate_python({"kind": "eager", "fast": True})
    monkeypatch.setenv("D9D_BACKEND_AUTO_GROUPED_MM", "torch")
    assert type(build_grouped_mm_backend(PARAMS, None)) is type(build_grouped_mm_backend(PARAMS, TORCH))
    monkeypatch.setenv("D9D_BACKEND_AUTO_GROUPED_MM", "fastest")
    with pytest.raises(ValueError, match="D9D_BACKEND_AUTO_GROUPED_MM=fastest names no"):
        build_grouped_mm_backend(PARAMS, None)


@pytest.mark.parametrize(
    ("config", "module", "package"),
    [
        (QuackGroupedMmBackendConfig(), "quack", "quack-kernels"),
        (GroupedGemmBackendConfig(), "grouped_gemm", "nv-grouped-gemm"),
    ],
)
def test_missing_packages_are_named(config: AnyGroupedMmBackendConfig, module: str, package: str):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=f'"pip install {package}"'):
        build_grouped_mm_backend(PARAMS, config)


def test_grouped_linear():
    layer = GroupedLinear(4, 6, 3, dtype=torch.float64, grouped_mm_backend=EAGER)
    assert layer.weight.shape == (4, 6, 3)
    assert layer.weight.abs().max() <= 6**-0.5
    x = torch.randn(8, 6, dtype=torch.float64)
    expected = torch.cat([x[:3] @ layer.weight[0], x[3:7] @ layer.weight[2], x[7:] @ layer.weight[3]])
    torch.testing.assert_close(layer(x, ExpertTokenGroups(torch.tensor(COUNTS[0]))), expected, **FP64)
    other = layer.with_features(2, 5)
    assert other.weight.shape == (4, 2, 5)
    assert other.weight.dtype == torch.float64
    on_meta = GroupedLinear(4, 6, 3, device="meta")
    assert on_meta.with_features(3, 1).weight.is_meta


def test_autocast_reaches_grouped_products():
    layer = GroupedLinear(4, IN, OUT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(8, IN), ExpertTokenGroups(torch.tensor(COUNTS[0]))).dtype == torch.bfloat16


def test_grouped_swiglu_scales_by_probabilities():
    experts = GroupedSwiGLU(6, 5, 2).double()
    randomize(experts)
    x, probabilities = torch.randn(3, 6, dtype=torch.float64), torch.tensor([0.1, 2.0, 0.5], dtype=torch.float64)
    result = experts(x, probabilities, ExpertTokenGroups(torch.tensor([1, 2])))
    for row, expert in enumerate((0, 1, 1)):
        gate, up = (x[row] @ projection.weight[expert] for projection in (experts.gate_proj, experts.up_proj))
        expected = (gate * gate.sigmoid() * up) @ experts.down_proj.weight[expert] * probabilities[row]
        torch.testing.assert_close(result[row], expected, **FP64)
