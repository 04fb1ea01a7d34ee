"""The MoE layer against transformers, forward and backward; dispatch by hand; statistics; recomputation."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d.module.block.moe import MoELayer, SharedExpertParameters, SharedSwiGLU
from d9d.module.block.moe.communications import NoCommunicationHandler
from d9d.module.block.moe.grouped_mm import (
    AnyGroupedMmBackendConfig,
    EagerGroupedMmBackendConfig,
    TorchGroupedMmBackendConfig,
)
from tests.d9d.module.block.oracles import FP32_SUMS, FP64, EverythingInDouble, randomize

HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 4, 6, 2  # sizes that torch's kernel takes in fp32
TOKENS = (3, 10)


def split_experts(gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of transformers (rows are outputs, gate above up) as ours."""
    return {
        "gate_proj": gate_up[:, :WIDTH].mT,
        "up_proj": gate_up[:, WIDTH:].mT,
        "down_proj": down.mT,
    }


def copy_routed(theirs: nn.Module, ours: MoELayer) -> None:
    with torch.no_grad():
        ours.router.gate.weight.copy_(theirs.gate.weight)
        for name, value in split_experts(theirs.experts.gate_up_proj, theirs.experts.down_proj).items():
            ours.grouped_experts.get_submodule(name).weight.copy_(value)


def assert_equal_routed_gradients(theirs: nn.Module, ours: MoELayer, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(ours.router.gate.weight.grad, theirs.gate.weight.grad, **tolerance)
    expected = split_experts(theirs.experts.gate_up_proj.grad, theirs.experts.down_proj.grad)
    for name, value in expected.items():
        torch.testing.assert_close(ours.grouped_experts.get_submodule(name).weight.grad, value, **tolerance)


def make_input(kind: str) -> torch.Tensor:
    x = torch.randn(*TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if kind == "ties":
        x[:, ::2] = 0.0  # all experts have the same score for half of the tokens
    if kind == "expert without tokens":
        x = x.abs()
    return x


def make_theirs(module: Any, kind: str, config: Any, block: str) -> nn.Module:
    config._experts_implementation = "eager"
    theirs = getattr(module, block)(config)
    randomize(theirs)
    if kind == "expert without tokens":
        theirs.gate.weight.data[3] = -100.0
    return theirs


def run(theirs: nn.Module, ours: nn.Module, x: torch.Tensor, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    """Outputs and gradients of inputs; gradients of weights are left in both."""
    ours_x, theirs_x = (x.to(dtype).clone().requires_grad_() for _ in range(2))
    if dtype == torch.float64:
        with EverythingInDouble():
            expected = theirs(theirs_x)
    else:
        expected = theirs(theirs_x)
    result = ours(ours_x)
    torch.testing.assert_close(result, expected, **tolerance)
    expected.sin().sum().backward()
    result.sin().sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, **tolerance)


@pytest.mark.parametrize("kind", ["plain", "ties", "expert without tokens"])
@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize(
    ("dtype", "backend", "tolerance"),
    [
        (torch.float64, EagerGroupedMmBackendConfig(), FP64),
        (torch.float32, EagerGroupedMmBackendConfig(), FP32_SUMS),
        (torch.float32, TorchGroupedMmBackendConfig(), FP32_SUMS),
    ],
)
def test_equals_qwen3_moe(
    kind: str, renormalizes: bool, dtype: torch.dtype, backend: AnyGroupedMmBackendConfig, tolerance: dict[str, float]
):
    qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen3_moe.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=renormalizes,
    )
    theirs = make_theirs(qwen3_moe, kind, config, "Qwen3MoeSparseMoeBlock").to(dtype)
    ours = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, renormalizes, grouped_mm_backend=backend).to(dtype)
    copy_routed(theirs, ours)
    run(theirs, ours, make_input(kind), dtype, tolerance)
    assert_equal_routed_gradients(theirs, ours, tolerance)
    assert ours.tokens_per_expert.sum() == 30 * TOP_K
    if kind == "expert without tokens":
        assert ours.tokens_per_expert[3] == 0
        assert not ours.grouped_experts.down_proj.weight.grad[3].any()


def test_shared_expert_with_gate_equals_qwen3_next():
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=5,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    theirs = make_theirs(qwen3_next, "plain", config, "Qwen3NextSparseMoeBlock").double()
    shared = SharedExpertParameters(intermediate_size=5, enable_gate=True)
    ours = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, True, shared).double()
    copy_routed(theirs, ours)
    names = [f"{projection}_proj" for projection in ("gate", "up", "down")]
    pairs = [(theirs.shared_expert.get_submodule(name), ours.shared_expert.mlp.get_submodule(name)) for name in names]
    pairs.append((theirs.shared_expert_gate, ours.shared_expert.gate))
    for source, target in pairs:
        target.weight.data.copy_(source.weight)
    run(theirs, ours, make_input("plain"), torch.float64, FP64)
    assert_equal_routed_gradients(theirs, ours, FP64)
    for source, target in pairs:
        torch.testing.assert_close(target.weight.grad, source.weight.grad, **FP64)


def test_shared_expert_without_gate_is_added():
    layer = MoELayer(
        HIDDEN, WIDTH, EXPERTS, TOP_K, True, SharedExpertParameters(intermediate_size=5, enable_gate=False)
    ).double()
    shared = layer.shared_expert
    assert isinstance(shared, SharedSwiGLU)
    assert shared.gate is None
    x = make_input("plain")
    with_shared = layer(x)
    layer.shared_expert = None
    torch.testing.assert_close(with_shared, layer(x) + shared.mlp(x), **FP64)


def test_dispatch_sorts_by_expert_and_combine_sums_per_token():
    handler = NoCommunicationHandler(4)
    tokens = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
    ids = torch.tensor([[3, 0], [0, 1], [3, 1]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], requires_grad=True)
    slots, slot_weights, groups = handler.dispatch(tokens, ids, weights)
    assert slots.flatten().tolist() == [1, 10, 10, 100, 1, 100]
    torch.testing.assert_close(slot_weights, torch.tensor([0.2, 0.3, 0.4, 0.6, 0.1, 0.5]))
    assert groups.counts.tolist() == [2, 2, 0, 2]
    factors = torch.tensor([[1.0], [2], [3], [4], [5], [6]])
    combined = handler.combine(slots * factors)
    assert combined.flatten().tolist() == [1 * (5 + 1), 10 * (2 + 3), 100 * (6 + 4)]
    (combined.sum() + slot_weights @ factors.flatten()).backward()
    assert tokens.grad.flatten().tolist() == [6, 5, 10]
    assert weights.grad.tolist() == [[5, 1], [2, 3], [6, 4]]
    with pytest.raises(RuntimeError, match="without a dispatch"):
        handler.combine(slots)


def test_dispatch_and_combine_have_second_derivatives():
    ids = torch.tensor([[2, 0], [0, 1], [2, 1]])

    def there_and_back(tokens: torch.Tensor) -> torch.Tensor:
        handler = NoCommunicationHandler(3)
        slots, _, _ = handler.dispatch(tokens, ids, torch.ones(3, 2))
        return handler.combine(slots**3)

    tokens = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(there_and_back, tokens)
    assert torch.autograd.gradgradcheck(there_and_back, tokens)


def test_no_tokens():
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, True)
    output = layer(torch.empty(2, 0, HIDDEN, requires_grad=True))
    assert output.shape == (2, 0, HIDDEN)
    output.sum().backward()
    assert all(not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_chooses_the_same_experts_and_counts_once(use_reentrant: bool):
    x = make_input("ties").requires_grad_()
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, True).double()
    randomize(layer)
    leaves = [x, *layer.parameters()]
    layer(x).sin().sum().backward()
    expected = [leaf.grad.clone() for leaf in leaves]
    counts = layer.tokens_per_expert.clone()
    layer.reset_stats()
    assert not layer.tokens_per_expert.any()
    for leaf in leaves:
        leaf.grad = None
    checkpoint(layer, x, use_reentrant=use_reentrant).sin().sum().backward()
    assert all(torch.equal(leaf.grad, right) for leaf, right in zip(leaves, expected, strict=True))
    assert torch.equal(layer.tokens_per_expert, counts)


def test_counts_add_up_over_calls():
    layer = MoELayer(HIDDEN, WIDTH, EXPERTS, EXPERTS, True).double()  # every token visits every expert
    for _ in range(2):
        layer(make_input("plain"))
    assert layer.tokens_per_expert.tolist() == [60] * EXPERTS
    assert "tokens_per_expert" not in layer.state_dict()


def test_late_init():
    with torch.device("meta"):
        layer = MoELayer(
            HIDDEN, WIDTH, EXPERTS, TOP_K, True, SharedExpertParameters(intermediate_size=5, enable_gate=True)
        )
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    layer.tokens_per_expert.fill_(7)
    layer.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert layer.tokens_per_expert.tolist() == [0] * EXPERTS
