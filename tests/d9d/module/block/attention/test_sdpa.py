"""Attention: the eager path against a loop over tokens and against gpt-oss, torch's kernels against the eager path."""

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from d9d.module.block.attention.sdpa import (
    AnySdpaBackendConfig,
    EagerSdpaBackendConfig,
    FlashAttention2SdpaBackendConfig,
    FlashAttention4SdpaBackendConfig,
    SdpaParameters,
    TorchSdpaBackendConfig,
    TorchSdpaBackendType,
    build_sdpa_backend,
)
from tests.d9d.module.block.oracles import FP64, EverythingInDouble

NUM_TOKENS, HEAD_DIM, VALUE_DIM, SCALE = 7, 6, 4, 0.4
WINDOWS = [(None, None), (2, None), (None, 1), (2, 1), (0, 0)]


def states(num_heads: int, num_tokens: int, head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_heads, num_tokens, head_dim, generator=generator, dtype=torch.float64).requires_grad_()


def all_states(num_heads: int = 4, num_key_heads: int = 2, num_queries: int = NUM_TOKENS) -> list[torch.Tensor]:
    return [
        states(num_heads, num_queries, HEAD_DIM, 1),
        states(num_key_heads, NUM_TOKENS, HEAD_DIM, 2),
        states(num_key_heads, NUM_TOKENS, VALUE_DIM, 3),
    ]


def make_mask(kind: str) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(4)
    match kind:
        case "none":
            return None
        case "bool":
            mask = torch.rand(2, 1, NUM_TOKENS, NUM_TOKENS, generator=generator) < 0.6
            mask[0, 0, 3] = False  # a query that sees nothing
            return mask
        case "float":
            return torch.randn(2, 4, NUM_TOKENS, NUM_TOKENS, generator=generator, dtype=torch.float64)
        case _:  # padding at the end of the second sequence
            return torch.tensor([[True] * 7, [True] * 4 + [False] * 3]).view(2, 1, 1, 7)


def by_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention token by token, from the definition."""
    groups, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    terms = torch.zeros(1) if mask is None else mask
    if terms.dtype == torch.bool:
        terms = torch.zeros(terms.shape, dtype=torch.float64).masked_fill(~terms, -math.inf)
    terms = terms.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    result = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                numerators = {}
                for j in range(k.shape[2]):
                    distance = j - (i + offset)
                    is_hidden = (
                        (is_causal and distance > 0)
                        or (window[0] is not None and distance < -window[0])
                        or (window[1] is not None and distance > window[1])
                    )
                    logit = (q[b, h, i] @ k[b, h // groups, j]).item() * SCALE + terms[b, h, i, j].item()
                    if not is_hidden and logit > -math.inf:
                        numerators[j] = math.exp(logit)
                total = sum(numerators.values()) + (0.0 if sinks is None else math.exp(sinks[h].item()))
                for j, numerator in numerators.items():
                    result[b, h, i] += numerator / total * v[b, h // groups, j]
    return result


def build(
    config: AnySdpaBackendConfig | None,
    window: tuple[int | None, int | None] = (None, None),
    num_sinks: int | None = None,
):
    backend = build_sdpa_backend(SdpaParameters(num_sinks=num_sinks, window_size=window), config)
    if num_sinks is not None:
        backend.double().sinks.logits.data.copy_(torch.linspace(-1, 2, num_sinks))
    return backend


@pytest.mark.parametrize("mask", ["none", "bool", "float", "padding"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_sinks", [None, 4])
def test_eager_is_attention_by_definition(mask, is_causal, window, num_sinks):
    q, k, v = (tensor.detach() for tensor in all_states())
    backend = build(EagerSdpaBackendConfig(), window, num_sinks)
    result = backend(q, k, v, make_mask(mask), is_causal, SCALE)
    sinks = None if num_sinks is None else torch.linspace(-1, 2, num_sinks, dtype=torch.float64)
    torch.testing.assert_close(result, by_loop(q, k, v, make_mask(mask), is_causal, window, sinks), **FP64)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "padding"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_sinks", [None, 4])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_torch_equals_eager(mask, is_causal, window, num_sinks, num_key_heads):
    inputs = all_states(num_key_heads=num_key_heads)
    results = []
    for config in (EagerSdpaBackendConfig(), TorchSdpaBackendConfig()):
        backend = build(config, window, num_sinks)
        output = backend(*inputs, make_mask(mask), is_causal, SCALE)
        leaves = [*inputs, *backend.parameters()]
        results.append((output, *torch.autograd.grad((output * output.detach().cos()).sum(), leaves)))
    assert len(results[0]) == (4 if num_sinks is None else 5)
    torch.testing.assert_close(results[1], results[0], **FP64)


@pytest.mark.parametrize("config", [EagerSdpaBackendConfig(), TorchSdpaBackendConfig()])
def test_fewer_queries_are_the_last_ones(config: AnySdpaBackendConfig):
    q, k, v = (tensor.detach() for tensor in all_states(num_queries=3))
    result = build(config, (3, None))(q, k, v, None, True, SCALE)
    torch.testing.assert_close(result, by_loop(q, k, v, None, True, (3, None), None), **FP64)


@pytest.mark.parametrize("config", [EagerSdpaBackendConfig(), TorchSdpaBackendConfig()])
def test_queries_that_see_nothing_get_zeros_and_no_gradient(config: AnySdpaBackendConfig):
    inputs = all_states()
    output = build(config)(*inputs, make_mask("bool"), False, SCALE)
    assert not output[0, :, 3].any()
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert not gradients[0][0, :, 3].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("config", [EagerSdpaBackendConfig(), TorchSdpaBackendConfig()])
def test_sinks_and_window_equal_gpt_oss(config: AnySdpaBackendConfig):
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    q, k, v = all_states()
    backend = build(config, (2, None), 4)
    sinks = backend.sinks.logits.detach().clone().requires_grad_()
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    positions = torch.arange(NUM_TOKENS)
    distance = positions[None] - positions[:, None]
    mask = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.float64)
    mask = mask.masked_fill((distance > 0) | (distance < -2), -math.inf)
    with EverythingInDouble():
        expected, _ = gpt_oss.eager_attention_forward(module, q, k, v, mask, SCALE)
    result = backend(q, k, v, None, True, SCALE).transpose(1, 2)  # theirs is (B, T, H, D)
    torch.testing.assert_close(result, expected, **FP64)
    leaves = [q, k, v]
    torch.testing.assert_close(
        torch.autograd.grad(result.square().sum(), [*leaves, backend.sinks.logits]),
        torch.autograd.grad(expected.square().sum(), [*leaves, sinks]),
        **FP64,
    )


def test_sinks_keep_their_value_in_low_precision():
    q, k, v = (tensor.detach().bfloat16() for tensor in all_states())
    results = []
    for config in (EagerSdpaBackendConfig(), TorchSdpaBackendConfig()):
        backend = build(config, num_sinks=4)
        backend.float().sinks.logits.data.fill_(9.97)  # 9.9375 or 10 in bf16: 3 % of its exponential
        results.append(backend(q, k, v, None, True, SCALE).float())
    # Outputs are weights of about exp(-10) times values: compare relative to the largest.
    assert (results[0] - results[1]).abs().max() / results[0].abs().max() < 2**-7


@pytest.mark.parametrize("kernels", [["MATH"], ["MATH", "FLASH_ATTENTION"]])
def test_kernels_can_be_chosen(kernels: list[str]):
    q, k, v = (tensor.detach() for tensor in all_states())
    config = TorchSdpaBackendConfig(backends=kernels)
    assert config.backends == [TorchSdpaBackendType(kernel) for kernel in kernels]
    torch.testing.assert_close(
        build(config)(q, k, v, None, True, SCALE), by_loop(q, k, v, None, True, (None, None), None), **FP64
    )


def test_only_chosen_kernels_run():
    q, k, v = all_states()
    with pytest.raises(RuntimeError, match=r"[Nn]o (viable backend|available kernel)"):
        build(TorchSdpaBackendConfig(backends=["CUDNN_ATTENTION"]))(q, k, v, None, True, SCALE)


class KeyHeads(TorchFunctionMode):
    """Notes how many key heads torch's function gets, and whether it is to share them."""

    calls: list[tuple[int, bool]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[1].shape[-3], kwargs["enable_gqa"]))
            return torch.empty(args[0].shape, device="meta")  # the other device may not be there
        return func(*args, **(kwargs or {}))


def key_heads(device: str, dtype: torch.dtype, kernels: list[str] | None, window: int | None) -> tuple[int, bool]:
    backend = build(TorchSdpaBackendConfig(backends=kernels), (window, None))
    q, k, v = (torch.empty(1, heads, 7, 8, device=device, dtype=dtype) for heads in (4, 2, 2))
    with KeyHeads() as seen:
        seen.calls = []
        backend(q, k, v, None, True, SCALE)
    (call,) = seen.calls
    return call


@pytest.mark.parametrize(
    ("device", "dtype", "kernels", "window", "shares"),
    [
        ("cpu", torch.float64, None, 2, True),
        ("meta", torch.bfloat16, None, None, True),
        ("meta", torch.bfloat16, None, 2, False),  # a mask
        ("meta", torch.float32, None, None, False),
        ("meta", torch.bfloat16, ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION"], None, False),
    ],
)
def test_key_heads_are_copied_where_no_fused_kernel_shares_them(
    device: str, dtype: torch.dtype, kernels: list[str] | None, window: int | None, shares: bool
):
    """What the documentation of torch 2.13 says of CUDA stands for all accelerators, here for none."""
    assert key_heads(device, dtype, kernels, window) == ((2, True) if shares else (4, False))


@pytest.mark.parametrize(
    ("dtype", "kernels", "window", "flash_computes", "others_may"),
    [
        (torch.bfloat16, None, None, True, True),
        (torch.bfloat16, None, 2, False, True),  # a mask
        (torch.float32, None, None, False, True),
        (torch.bfloat16, ["EFFICIENT_ATTENTION"], None, False, True),
        (torch.bfloat16, ["FLASH_ATTENTION", "CUDNN_ATTENTION"], 2, False, True),
        (torch.bfloat16, ["FLASH_ATTENTION", "MATH"], 2, False, False),
    ],
)
def test_key_heads_are_shared_on_cuda_by_the_kernels_that_torch_names(
    dtype: torch.dtype, kernels: list[str] | None, window: int | None, flash_computes: bool, others_may: bool
):
    """Asks the documentation of the torch that is installed."""
    said = " ".join((torch.nn.functional.scaled_dot_product_attention.__doc__ or "").split())
    says_all = "cuDNN attention" in said and "Memory-efficient attention also supports GQA on NVIDIA CUDA" in said
    shares = flash_computes or (others_may and says_all and torch.version.hip is None)
    with FakeTensorMode():
        assert key_heads("cuda", dtype, kernels, window) == ((2, True) if shares else (4, False))


def test_config_union():
    adapter = TypeAdapter(AnySdpaBackendConfig)
    for config in (
        EagerSdpaBackendConfig(),
        TorchSdpaBackendConfig(backends=["MATH"]),
        FlashAttention2SdpaBackendConfig(),
        FlashAttention4SdpaBackendConfig(),
    ):
        assert adapter.validate_python(config.model_dump(mode="json")) == config
    for wrong in ({"kind": "flash"}, {"kind": "eager", "backends": []}, {"kind": "torch", "backends": ["math"]}, {}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_automatic_choice(monkeypatch: pytest.MonkeyPatch):
    torch_kind, eager_kind = type(build(TorchSdpaBackendConfig())), type(build(EagerSdpaBackendConfig()))
    monkeypatch.delenv("D9D_BACKEND_AUTO_SDPA", raising=False)
    assert type(build(None)) is torch_kind
    monkeypatch.setenv("D9D_BACKEND_AUTO_SDPA", "eager")
    assert type(build(None)) is eager_kind
    assert type(build(TorchSdpaBackendConfig())) is torch_kind
    monkeypatch.setenv("D9D_BACKEND_AUTO_SDPA", "cutting_edge")
    with pytest.raises(ValueError, match="D9D_BACKEND_AUTO_SDPA=cutting_edge names no"):
        build(None)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
@pytest.mark.parametrize(
    ("config", "package"),
    [(FlashAttention2SdpaBackendConfig(), "flash-attn"), (FlashAttention4SdpaBackendConfig(), "flash-attn-4")],
)
def test_missing_packages_are_named(config: AnySdpaBackendConfig, package: str):
    with pytest.raises(ImportError, match=f'"pip install {package}"'):
        build(config)


def test_mistakes_are_named():
    q, k, v = all_states(num_heads=4, num_key_heads=3)
    with pytest.raises(ValueError, match="4 query heads can not share 3 key heads"):
        build(TorchSdpaBackendConfig())(q, k, v, None, True, SCALE)
    q, k, v = all_states()
    with pytest.raises(ValueError, match=r"dtype torch.int64. Pass booleans"):
        build(EagerSdpaBackendConfig())(q, k, v, torch.ones(1, 1, 7, 7, dtype=torch.int64), True, SCALE)
    for config in (EagerSdpaBackendConfig(), TorchSdpaBackendConfig()):
        with pytest.raises(ValueError, match=r"shape \(2, 7\).*Pass mask\[:, None, None, :\] for padding"):
            build(config)(q, k, v, torch.ones(2, 7, dtype=torch.bool), False, SCALE)
    with pytest.raises(ValueError, match="queries have 4 heads, but there are 3 sinks"):
        build(TorchSdpaBackendConfig(), num_sinks=3)(q, k, v, None, True, SCALE)
    with pytest.raises(ValueError, match="negative limit"):
        SdpaParameters(num_sinks=None, window_size=(-1, None))
    with pytest.raises(ValueError, match="num_sinks"):
        SdpaParameters(num_sinks=0)
