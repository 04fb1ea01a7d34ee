"""Calls of kernels of other packages, which need devices that tests have not: stand-ins with the signatures of the packages.

They show that arguments, layouts and gradients are what the packages ask for, and not that the kernels compute it; that is what
`test_fused_kernels` is for. Signatures and demands are those of the code of flash-attn 2.8.3, flash-attn-4 4.0.0b36,
flash-linear-attention 0.6.0, quack-kernels 0.6.5 and nv-grouped-gemm 1.1.4; where a package is installed, they are compared with
its files.
"""

import ast
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from d9d.kernel.grouped_mm import eager, nv
from d9d.module.block.attention.linear import FlaDeltaRuleConfig, GatedDeltaNet, MambaDecayGateParameters
from d9d.module.block.attention.linear.delta_rule import build_delta_rule
from d9d.module.block.attention.sdpa import (
    AnySdpaBackendConfig,
    EagerSdpaBackendConfig,
    FlashAttention2SdpaBackendConfig,
    FlashAttention4SdpaBackendConfig,
    SdpaParameters,
    build_sdpa_backend,
)
from d9d.module.block.moe.grouped_mm import (
    AnyGroupedMmBackendConfig,
    EagerGroupedMmBackendConfig,
    ExpertTokenGroups,
    GroupedGemmBackendConfig,
    GroupedMmParameters,
    QuackGroupedMmBackendConfig,
    build_grouped_mm_backend,
)
from tests.d9d.module.block.oracles import FP64, randomize


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """Put a module, and empty packages above it, where imports find them."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if end > 1:
            vars(sys.modules[".".join(parts[: end - 1])])[parts[end - 1]] = module
    vars(sys.modules[name]).update(functions)


def attention(q, k, v, scale, causal, window, sinks=None):
    """Attention ``(B, T, H, D)`` with the last query at the last key; values as wide as keys or not."""
    keys, values = (states.repeat_interleave(q.shape[2] // states.shape[2], dim=2) for states in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    distance = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - q.shape[1], k.shape[1]).unsqueeze(1)
    left, right = window
    right = 0 if causal else right
    if left is not None:
        logits = logits.masked_fill(distance < -left, -torch.inf)
    if right is not None:
        logits = logits.masked_fill(distance > right, -torch.inf)
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, extra), -1)
    weights = logits.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, values)


def flash_attn_func_2(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert k.shape == v.shape
    return attention(q, k, v, softmax_scale, causal, [None if size == -1 else size for size in window_size])


def flash_attn_func_4(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
):
    return attention(q, k, v, softmax_scale, causal, window_size, learnable_sink), None


def states(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("value_dim", [4, 8])
@pytest.mark.parametrize("window", [(None, None), (2, None), (2, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("config", "num_sinks"),
    [
        (FlashAttention2SdpaBackendConfig(), None),
        (FlashAttention4SdpaBackendConfig(), None),
        (FlashAttention4SdpaBackendConfig(), 4),
    ],
)
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    config: AnySdpaBackendConfig,
    num_sinks: int | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
    value_dim: int,
):
    install(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func_4)
    vars(sys.modules["flash_attn"])["flash_attn_func"] = flash_attn_func_2
    params = SdpaParameters(num_sinks=num_sinks, window_size=window)
    q, k, v = states(2, 4, 5, 6), states(2, 2, 7, 6), states(2, 2, 7, value_dim)
    results = []
    for each in (config, EagerSdpaBackendConfig()):
        backend = build_sdpa_backend(params, each)
        if num_sinks is not None:
            backend.double().sinks.logits.data.copy_(torch.linspace(-1, 2, num_sinks))
        output = backend(q, k, v, None, is_causal, 0.4)
        results.append((output, *torch.autograd.grad(output.sin().sum(), (q, k, v))))
    torch.testing.assert_close(*results, **FP64)


def test_flash_attention_2_copies_only_states_that_are_too_narrow(monkeypatch: pytest.MonkeyPatch):
    given: list[int] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        given.extend(each.data_ptr() for each in (q, k, v))
        return q

    install(monkeypatch, "flash_attn", flash_attn_func=kernel)
    backend = build_sdpa_backend(SdpaParameters(num_sinks=None), FlashAttention2SdpaBackendConfig())
    q, k, v, narrow = states(2, 4, 5, 8), states(2, 2, 5, 8), states(2, 2, 5, 8), states(2, 2, 5, 6)
    backend(q, k, v, None, True, 1.0)
    assert given == [each.data_ptr() for each in (q, k, v)]
    given.clear()
    backend(q, k, narrow, None, True, 1.0)
    assert given[:2] == [q.data_ptr(), k.data_ptr()]
    assert given[2] != narrow.data_ptr()


def test_what_the_kernels_of_attention_can_not_do(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func_4)
    vars(sys.modules["flash_attn"])["flash_attn_func"] = flash_attn_func_2
    with pytest.raises(NotImplementedError, match="flash_attention_2 has no sinks"):
        build_sdpa_backend(SdpaParameters(num_sinks=4), FlashAttention2SdpaBackendConfig())
    x = states(1, 2, 3, 4)
    for config in (FlashAttention2SdpaBackendConfig(), FlashAttention4SdpaBackendConfig()):
        with pytest.raises(NotImplementedError, match="takes no masks"):
            build_sdpa_backend(SdpaParameters(num_sinks=None, needs_attention_mask=True), config)
        backend = build_sdpa_backend(SdpaParameters(num_sinks=None), config)
        with pytest.raises(NotImplementedError, match="takes no masks"):
            backend(x, x, x, torch.ones(1, 1, 3, 3, dtype=torch.bool), True, 1.0)


def test_windows_that_flash_attention_2_would_leave_out(monkeypatch: pytest.MonkeyPatch):
    """Its kernels in Triton do not look at them."""
    install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func_2)
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    with pytest.raises(NotImplementedError, match=r"leaves out the window \(2, None\)"):
        build_sdpa_backend(SdpaParameters(num_sinks=None, window_size=(2, None)), FlashAttention2SdpaBackendConfig())
    build_sdpa_backend(SdpaParameters(num_sinks=None), FlashAttention2SdpaBackendConfig())


def test_sinks_of_flash_attention_4_keep_their_precision(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func_4)
    x = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    backend = build_sdpa_backend(SdpaParameters(num_sinks=1), FlashAttention4SdpaBackendConfig())
    backend.sinks.logits.data.fill_(9.97)  # 9.9375 or 10 in bf16
    # One key with a logit of 0 beside the sink.
    output = backend(x, x, torch.ones_like(x), None, True, 1.0).float()
    torch.testing.assert_close(output, torch.full((1, 1, 1, 8), 1 / (1 + math.exp(9.97))), rtol=2**-8, atol=0)


def gmm(a, b, batch_sizes, trans_b=False):
    assert batch_sizes.dtype == torch.int64
    assert batch_sizes.device.type == "cpu"
    assert batch_sizes.any()
    assert a.is_contiguous()
    assert b.is_contiguous()
    matrices = b.mT if trans_b else b
    return torch.cat([rows @ matrix for rows, matrix in zip(a.split(batch_sizes.tolist()), matrices, strict=True)])


def gemm(A, B, out=None, bias=None, alpha=1.0, *, cu_seqlens_m=None, cu_seqlens_k=None):
    """``(total_M, K) @ (L, K, N)`` by rows, or ``(M, total_K) @ (total_K, N)`` to ``(L, M, N)`` by sums."""
    bounds = cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k
    assert bounds.dtype == torch.int32
    sizes = bounds.diff().tolist()
    if cu_seqlens_k is None:
        assert A.is_contiguous()
        return torch.cat([rows @ matrix for rows, matrix in zip(A.split(sizes), B, strict=True)])
    assert A.T.is_contiguous()
    return torch.stack([left @ right for left, right in zip(A.split(sizes, 1), B.split(sizes), strict=True)])


@pytest.mark.parametrize("config", [GroupedGemmBackendConfig(), QuackGroupedMmBackendConfig()])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 0]])
def test_grouped_products(monkeypatch: pytest.MonkeyPatch, config: AnyGroupedMmBackendConfig, counts: list[int]):
    install(monkeypatch, "grouped_gemm.ops", gmm=gmm)
    install(monkeypatch, "quack.gemm_interface", gemm=gemm)
    params = GroupedMmParameters(in_features=5, out_features=3)
    x, weight = states(sum(counts), 5), states(4, 5, 3)
    results = []
    for each in (config, EagerGroupedMmBackendConfig()):
        output = build_grouped_mm_backend(params, each)(x, weight, ExpertTokenGroups(torch.tensor(counts)))
        results.append((output, *torch.autograd.grad(output.sum(), (x, weight))))  # the gradient of a sum is expanded
    torch.testing.assert_close(*results, **FP64)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_other_strides(is_transposed: bool):
    """Which the kernel of nv-grouped-gemm refuses."""
    x, weight = states(5, 8).T, states(2, 3, 5) if is_transposed else states(2, 3, 5).mT
    product = nv.multiply(gmm, x, weight, torch.tensor([6, 2]), is_transposed)
    torch.testing.assert_close(product, eager.multiply(x, weight.mT if is_transposed else weight, [6, 2]), **FP64)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    """Token by token: ``(B, T, H, K)``, ``(B, T, H, V)`` and ``(B, T, H)``; maybe more heads of values than of keys."""
    q, k = (states.repeat_interleave(v.shape[2] // states.shape[2], dim=2) for states in (q, k))
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        written = beta[:, t].unsqueeze(-1) * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(outputs, 1), None


def test_delta_rule(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)

    def layer(config: FlaDeltaRuleConfig | None) -> GatedDeltaNet:
        decay = MambaDecayGateParameters(normalizer=1, dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4)
        built = GatedDeltaNet(8, 2, 4, 3, 5, 1e-6, 3, decay, delta_rule=config).double()
        randomize(built)
        return built

    x = states(2, 9, 8)
    results = []
    for each in (layer(FlaDeltaRuleConfig()), layer(None)):
        output = each(x)
        results.append((output, *torch.autograd.grad(output.sin().sum(), [x, *each.parameters()])))
    torch.testing.assert_close(*results, **FP64)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(ImportError, match=r'"pip install flash-linear-attention", or use the kind chunked'):
        build_delta_rule(FlaDeltaRuleConfig())


STAND_INS: list[tuple[Callable[..., object], str, str]] = [
    (flash_attn_func_2, "flash_attn.flash_attn_interface", "flash_attn_func"),
    (flash_attn_func_4, "flash_attn.cute.interface", "flash_attn_func"),
    (gmm, "grouped_gemm.ops", "gmm"),
    (gemm, "quack.gemm_interface", "gemm"),
    (chunk_gated_delta_rule, "fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"),
]


@pytest.mark.parametrize(("stand_in", "module", "name"), STAND_INS, ids=[module for _, module, _ in STAND_INS])
def test_stand_ins_have_the_parameters_of_the_packages(stand_in: Callable[..., object], module: str, name: str):
    """By reading their files: most can not be imported without a device."""
    package, *path = module.split(".")
    spec = importlib.util.find_spec(package)
    files = [Path(folder, *path).with_suffix(".py") for folder in (spec and spec.submodule_search_locations) or ()]
    source = next((file.read_text(encoding="utf-8") for file in files if file.exists()), None)
    if source is None:
        pytest.skip(f"{module} is not installed")
    definition = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    theirs = definition.args.args + definition.args.kwonlyargs
    defaults = [
        ast.unparse(value) if value else "None" for value in definition.args.defaults + definition.args.kw_defaults
    ]
    theirs_by_name = dict(zip((each.arg for each in theirs[::-1]), defaults[::-1], strict=False))
    for index, parameter in enumerate(inspect.signature(stand_in).parameters.values()):
        if parameter.default is not parameter.empty:
            assert theirs_by_name[parameter.name] == repr(parameter.default)
        elif parameter.name not in theirs_by_name:
            assert theirs[index].arg == parameter.name
