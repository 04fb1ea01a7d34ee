"""Each fused kernel against its plain path, where it can run.

That is on an accelerator, with the package installed. Kernels that are written in Triton also run on the CPU, interpreted:
``make kernels``. What needs neither runs everywhere.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from d9d.core.device import resolve_device_type
from d9d.kernel.cce import IGNORE_INDEX, linear_cross_entropy
from d9d.kernel.grouped_mm import quack as quack_products
from d9d.module.block.attention.linear import FlaDeltaRuleConfig, GatedDeltaNet, LogSigmoidDecayGateParameters
from d9d.module.block.attention.linear.delta_rule import build_delta_rule
from d9d.module.block.attention.sdpa import (
    AnySdpaBackendConfig,
    EagerSdpaBackendConfig,
    FlashAttention2SdpaBackendConfig,
    FlashAttention4SdpaBackendConfig,
    SdpaParameters,
    TorchSdpaBackendConfig,
    build_sdpa_backend,
)
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
from tests.d9d.module.block.oracles import randomize
from tests.d9d.module.block.triton_interpreter import (
    IS_INTERPRETED,
    count_loops_in_tensors,
    give_log1p,
    take_cpu_tensors,
    use_first_configs,
)

DEVICE = resolve_device_type()
ON_CPU = DEVICE == "cpu"
# Parts of the largest value: a few roundings to 11 and to 8 bits, and of an accelerator's products of fp32 to 11 bits.
HALF, BRAIN, WIDE = 2**-8, 2**-5, 1e-5 if ON_CPU else 2**-7

if IS_INTERPRETED:
    pytest.importorskip("triton")
    use_first_configs()


def need_accelerator(package: str | None = None) -> None:
    """Skip what can not run here."""
    if ON_CPU:
        pytest.skip("needs an accelerator")
    if package is not None:
        pytest.importorskip(package)


def need_triton(package: str) -> None:
    """Skip what can not run here."""
    if ON_CPU and not IS_INTERPRETED:
        pytest.skip("needs an accelerator, or Triton with TRITON_INTERPRET=1: `make kernels`")
    pytest.importorskip(package)


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return wide.to(DEVICE, dtype).requires_grad_()


def with_gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    output = function(*inputs)
    weights = torch.linspace(-1, 2, output.numel(), device=output.device, dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def assert_agree(found: list[torch.Tensor], plain: list[torch.Tensor], part: float) -> None:
    """Compare with what the plain path gives for the same inputs in fp32, relative to the largest value of each, or to 1."""
    for ours, right in zip(found, plain, strict=True):
        torch.testing.assert_close(ours.float(), right.float(), rtol=0, atol=part * max(1.0, right.abs().max().item()))


def widened(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach().float().requires_grad_() for each in inputs]


def torch_kernel(name: str) -> TorchSdpaBackendConfig:
    return TorchSdpaBackendConfig(backends=[name])


def need_attention_kernel(config: AnySdpaBackendConfig, takes_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip what a kernel can not compute or where it can not run."""
    match config:
        case TorchSdpaBackendConfig(backends=["FLASH_ATTENTION"]):
            if takes_mask and not ON_CPU:
                pytest.skip("torch's flash attention on accelerators takes no mask")
        case TorchSdpaBackendConfig():
            need_accelerator()
        case FlashAttention2SdpaBackendConfig():
            if IS_INTERPRETED:
                monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
            need_triton("flash_attn.flash_attn_interface")
            if IS_INTERPRETED:
                from flash_attn import flash_attn_interface as kernels

                take_cpu_tensors(kernels._flash_attn_forward, kernels._flash_attn_backward)
        case _:
            need_accelerator("flash_attn.cute")


@pytest.mark.parametrize(
    "config",
    [
        torch_kernel("FLASH_ATTENTION"),
        torch_kernel("EFFICIENT_ATTENTION"),
        torch_kernel("CUDNN_ATTENTION"),
        FlashAttention2SdpaBackendConfig(),
        FlashAttention4SdpaBackendConfig(),
    ],
    ids=lambda config: "-".join([config.kind, *vars(config).get("backends", [])]),
)
@pytest.mark.parametrize(
    ("is_causal", "window", "has_sinks", "num_queries"),
    [
        (True, (None, None), False, 80),
        (False, (None, None), False, 80),
        (True, (None, None), False, 20),  # the last ones
        (True, (5, None), False, 80),
        (False, (5, 3), False, 80),
        (True, (5, None), True, 80),
    ],
)
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    config: AnySdpaBackendConfig,
    is_causal: bool,
    window: tuple[int | None, int | None],
    has_sinks: bool,
    num_queries: int,
):
    """Four query heads share two key heads."""
    is_package = not isinstance(config, TorchSdpaBackendConfig)
    is_masked = window != (None, None) or has_sinks or num_queries != 80
    need_attention_kernel(config, is_masked and not is_package, monkeypatch)
    params = SdpaParameters(num_sinks=4 if has_sinks else None, window_size=window)
    try:
        backend = build_sdpa_backend(params, config)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    dim = 64 if is_package and not ON_CPU else 16
    shapes = [(1, 4, num_queries, dim), (1, 2, 80, dim), (1, 2, 80, dim)]
    inputs = [values(*shape, dtype=torch.float16, seed=seed) for seed, shape in enumerate(shapes)]
    results = []
    for attention, states in (
        (backend, inputs),
        (build_sdpa_backend(params, EagerSdpaBackendConfig()), widened(inputs)),
    ):
        leaves = list(states)
        if has_sinks:
            attention.to(DEVICE).sinks.logits.data.copy_(torch.linspace(-1, 2, 4))
            leaves += attention.parameters()
        results.append(with_gradients(lambda *x, call=attention: call(*x[:3], None, is_causal, 0.2), leaves))
    assert_agree(*results, HALF)


def test_flash_attention_2_pads_values_that_are_narrower_or_wider(monkeypatch: pytest.MonkeyPatch):
    config = FlashAttention2SdpaBackendConfig()
    need_attention_kernel(config, False, monkeypatch)
    for value_dim in (8, 24):
        shapes = [(1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, value_dim)]
        inputs = [values(*shape, dtype=torch.float16, seed=seed) for seed, shape in enumerate(shapes)]
        backends = [build_sdpa_backend(SdpaParameters(num_sinks=None), c) for c in (config, EagerSdpaBackendConfig())]
        results = [
            with_gradients(lambda q, k, v, call=backend: call(q, k, v, None, True, 0.2), states)
            for backend, states in zip(backends, (inputs, widened(inputs)), strict=True)
        ]
        assert_agree(*results, HALF)


def test_flash_attention_4_compiles(monkeypatch: pytest.MonkeyPatch):
    """For a Hopper GPU, without one: what it is called with passes all of its checks and the compiler."""
    if torch.version.cuda is None:
        pytest.skip("needs a torch that is built for CUDA")
    environment = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    if ON_CPU:  # version 2, if it is there too, would ask for CUDA
        environment["FLASH_ATTENTION_TRITON_AMD_ENABLE"] = "TRUE"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("flash_attn.cute", exc_type=ImportError)
    with FakeTensorMode(), torch.device("cuda"):
        params = SdpaParameters(num_sinks=4, window_size=(5, None))
        backend = build_sdpa_backend(params, FlashAttention4SdpaBackendConfig())
        q, k, v = (torch.empty(1, heads, 80, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        assert backend(q, k, v, None, True, 0.2).shape == (1, 4, 80, 64)


@pytest.mark.parametrize(
    ("config", "package"),
    [
        (None, None),
        (TorchGroupedMmBackendConfig(), None),
        (QuackGroupedMmBackendConfig(), "quack.gemm_interface"),
        (GroupedGemmBackendConfig(), "grouped_gemm"),
    ],
)
@pytest.mark.parametrize("counts", [[30, 0, 34, 8], [0, 0, 0, 0]])
def test_grouped_products(config: AnyGroupedMmBackendConfig | None, package: str | None, counts: list[int]):
    if package is not None:
        need_accelerator(package)
    params = GroupedMmParameters(in_features=32, out_features=64)
    inputs = [values(sum(counts), 32, dtype=torch.bfloat16, seed=0), values(4, 32, 64, dtype=torch.bfloat16, seed=1)]
    results = []
    for each, operands in ((config, inputs), (EagerGroupedMmBackendConfig(), widened(inputs))):
        multiply = build_grouped_mm_backend(params, each)
        groups = ExpertTokenGroups(torch.tensor(counts, device=DEVICE))
        results.append(with_gradients(lambda x, w, call=multiply, of=groups: call(x, w, of), operands))
    if not sum(counts):
        results = [[of_matrices] for _, _, of_matrices in results]  # all else is empty
    assert_agree(*results, BRAIN)


def test_grouped_products_by_the_reference_of_quack():
    """What the package says that its kernel computes, in plain torch."""
    reference = pytest.importorskip("quack.gemm_interface", exc_type=ImportError).gemm_ref
    inputs = [values(72, 32, dtype=torch.float32, seed=0), values(4, 32, 64, dtype=torch.float32, seed=1)]
    ends = torch.tensor([30, 30, 64, 72], dtype=torch.int32, device=DEVICE)
    eager = build_grouped_mm_backend(
        GroupedMmParameters(in_features=32, out_features=64), EagerGroupedMmBackendConfig()
    )
    groups = ExpertTokenGroups(torch.tensor([30, 0, 34, 8], device=DEVICE))
    assert_agree(
        with_gradients(lambda x, w: quack_products.multiply(reference, x, w, ends), inputs),
        with_gradients(lambda x, w: eager(x, w, groups), inputs),
        WIDE,
    )


@pytest.mark.parametrize("arguments", [{}, {"reduction": "sum", "shift": True}, {"reduction": "none"}], ids=str)
def test_cut_cross_entropy(arguments: dict[str, Any]):
    """Ours is plain torch everywhere; the package's kernel is what its names and arguments are from."""
    need_triton("cut_cross_entropy")
    import cut_cross_entropy

    if IS_INTERPRETED:
        give_log1p(cut_cross_entropy.tl_utils)
    e, c = values(2, 9, 32, dtype=torch.float16, seed=0), values(50, 32, dtype=torch.float16, seed=1)
    labels = torch.arange(18, device=DEVICE).view(2, 9) * 2
    labels[0, 3] = IGNORE_INDEX
    assert_agree(
        with_gradients(lambda *x: cut_cross_entropy.linear_cross_entropy(*x, labels, **arguments), [e, c]),
        with_gradients(lambda *x: linear_cross_entropy(*x, labels, **arguments), widened([e, c])),
        HALF,
    )


def fla_delta_rule() -> Callable[..., torch.Tensor]:
    need_triton("fla")
    rule = build_delta_rule(FlaDeltaRuleConfig())
    if IS_INTERPRETED:
        count_loops_in_tensors("fla")
    return rule


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "part"),
    [(1, torch.float32, WIDE), (65, torch.float32, WIDE), (130, torch.float32, WIDE), (70, torch.float16, HALF)],
)
def test_delta_rule(num_tokens: int, dtype: torch.dtype, part: float):
    """Sizes that are no powers of two, and a token that forgets nearly all.

    Not in bfloat16: Triton's interpreter multiplies its bits as integers (3.8).
    """
    rule = fla_delta_rule()
    q, k, v = (values(1, 2, num_tokens, dim, dtype=torch.float32, seed=dim) for dim in (24, 25, 40))
    k = torch.nn.functional.normalize(k[..., :24], dim=-1)
    gates = values(2, 1, 2, num_tokens, dtype=torch.float32, seed=3).detach()
    log_decays, strengths = -gates[0].abs(), gates[1].sigmoid()
    log_decays[..., num_tokens // 2] = -30.0
    inputs = [each.detach().to(dtype).requires_grad_() for each in (q, k, v)]
    inputs += [log_decays.requires_grad_(), strengths.to(dtype).requires_grad_()]
    assert_agree(with_gradients(rule, inputs), with_gradients(build_delta_rule(None), widened(inputs)), part)


def test_gated_delta_net():
    """With more heads of values than of keys."""
    fla_delta_rule()

    def layer(config: FlaDeltaRuleConfig | None) -> GatedDeltaNet:
        decay = LogSigmoidDecayGateParameters(normalizer=16.0)
        net = GatedDeltaNet(32, 1, 2, 16, 16, 1e-6, 4, decay, delta_rule=config).to(DEVICE)
        randomize(net)
        return net

    results: list[list[torch.Tensor]] = []
    x = values(2, 67, 32, dtype=torch.float32, seed=0)
    for config in (FlaDeltaRuleConfig(), None):
        net = layer(config)
        parameters = list(net.parameters())

        def call(states: torch.Tensor, *_: Any, net: GatedDeltaNet = net) -> torch.Tensor:
            return net(states)

        results.append(with_gradients(call, [x, *parameters]))
    assert_agree(*results, 10 * WIDE)
