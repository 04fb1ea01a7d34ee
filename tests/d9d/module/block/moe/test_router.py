"""The router by hand and against Qwen3-MoE of transformers; the bias and its update."""

import pytest
import torch

from d9d.module.block.moe import ExpertGroupLimit, RouterScoring, RoutingParameters, TopKRouter
from tests.d9d.module.block.oracles import FP64, EverythingInDouble

# Softmax of log(x) is x over its sum.
PROBABILITIES = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)


def router_of(probabilities: torch.Tensor, **kwargs) -> tuple[TopKRouter, torch.Tensor]:
    router = TopKRouter(1, probabilities.shape[1], 2, **kwargs).double()
    with torch.no_grad():
        router.gate.weight.copy_(probabilities.log().T)
    return router, torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.parametrize(("renormalizes", "expected"), [(False, [0.4, 0.3]), (True, [4 / 7, 3 / 7])])
def test_takes_the_most_probable(renormalizes: bool, expected: list[float]):
    router, x = router_of(PROBABILITIES, renormalize_probabilities=renormalizes)
    routing = router(x)
    assert routing.selected_expert_indices.tolist() == [[1, 3]]
    torch.testing.assert_close(routing.selected_probabilities, torch.tensor([expected], dtype=torch.float64), **FP64)


def test_bias_moves_the_choice_and_not_the_weights():
    router, x = router_of(PROBABILITIES, renormalize_probabilities=False, enable_expert_bias=True)
    router.expert_bias[0] = 0.25  # 0.35: between 0.4 and 0.3
    routing = router(x)
    assert routing.selected_expert_indices.tolist() == [[1, 0]]
    torch.testing.assert_close(routing.selected_probabilities, torch.tensor([[0.4, 0.1]], dtype=torch.float64), **FP64)
    assert "expert_bias" in router.state_dict()
    assert not isinstance(router.expert_bias, torch.nn.Parameter)


def test_update_moves_the_bias_against_the_load():
    router, _ = router_of(PROBABILITIES, renormalize_probabilities=False, enable_expert_bias=True)
    router.update_expert_bias(torch.tensor([10, 0, 4, 2]), rate=0.5)  # the mean is 4
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.5]
    router.update_expert_bias(torch.tensor([0, 0, 0, 1]), rate=0.25)
    assert router.expert_bias.tolist() == [-0.25, 0.75, 0.25, 0.25]
    plain, _ = router_of(PROBABILITIES, renormalize_probabilities=False)
    with pytest.raises(RuntimeError, match="no expert bias"):
        plain.update_expert_bias(torch.tensor([1, 1, 1, 1]), rate=0.5)


def test_bias_stays_fp32():
    router = TopKRouter(4, 4, 2, True, enable_expert_bias=True).bfloat16()
    assert router.gate.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32
    routing = router(torch.randn(3, 4, dtype=torch.bfloat16))
    assert routing.selected_probabilities.dtype == torch.float32


@pytest.mark.parametrize("renormalizes", [False, True])
def test_equals_qwen3_moe(renormalizes: bool):
    qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen3_moe.Qwen3MoeConfig(hidden_size=6, num_experts=8, num_experts_per_tok=3, norm_topk_prob=renormalizes)
    theirs, ours = qwen3_moe.Qwen3MoeTopKRouter(config).double(), TopKRouter(6, 8, 3, renormalizes).double()
    with torch.no_grad():
        ours.gate.weight.normal_()
        theirs.weight.copy_(ours.gate.weight)
    x = torch.randn(20, 6, dtype=torch.float64)
    x[10:] = 0.0  # all experts are equal
    with EverythingInDouble():
        _, probabilities, indices = theirs(x)
    routing = ours(x)
    assert torch.equal(routing.selected_expert_indices, indices)
    torch.testing.assert_close(routing.selected_probabilities, probabilities, **FP64)


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_must_fit(top_k: int):
    with pytest.raises(ValueError, match=rf"top_k \({top_k}\) must be between 1 and the number of experts \(8\)"):
        TopKRouter(6, 8, top_k, True)


def test_late_init():
    with torch.device("meta"):
        router = TopKRouter(6, 8, 3, True, enable_expert_bias=True)
    router.to_empty(device="cpu")
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.fill_(float("nan"))
    router.reset_parameters()
    assert router.gate.weight.isfinite().all()
    assert router.expert_bias.tolist() == [0.0] * 8


def sigmoid_router(scores: list[float], top_k: int, **routing) -> tuple[TopKRouter, torch.Tensor]:
    """A router whose only token has these scores."""
    router = TopKRouter(
        1, len(scores), top_k, True, routing=RoutingParameters(scoring=RouterScoring.sigmoid, **routing)
    ).double()
    with torch.no_grad():
        router.gate.weight.copy_(torch.tensor(scores, dtype=torch.float64).logit().unsqueeze(1))
    return router, torch.ones(1, 1, dtype=torch.float64)


def test_sigmoids_are_scores_of_their_own():
    router, x = sigmoid_router([0.9, 0.1, 0.6, 0.5], 2, scaling_factor=2.5)
    routing = router(x)
    assert routing.selected_expert_indices.tolist() == [[0, 2]]
    expected = torch.tensor([[2.5 * 0.9 / 1.5, 2.5 * 0.6 / 1.5]], dtype=torch.float64)
    torch.testing.assert_close(routing.selected_probabilities, expected, **FP64)


def test_groups_that_a_token_chooses_from():
    """Sums of the two best: 1.0, 1.1, 0.9. So the best expert of all is left out, and the best group has the next."""
    scores = [0.95, 0.05, 0.01, 0.5, 0.6, 0.02, 0.45, 0.45, 0.3]
    limit = ExpertGroupLimit(num_groups=3, num_selected_groups=1)
    router, x = sigmoid_router(scores, 2, group_limit=limit)
    assert router(x).selected_expert_indices.tolist() == [[4, 3]]
    router, x = sigmoid_router(scores, 2, group_limit=ExpertGroupLimit(num_groups=3, num_selected_groups=2))
    assert router(x).selected_expert_indices.tolist() == [[0, 4]]


def test_logits_in_fp32():
    """Weights of 16 bits, and a sum of which 16 bits would lose the small part."""
    router = TopKRouter(2, 2, 1, False, routing=RoutingParameters(has_wide_logits=True)).bfloat16()
    with torch.no_grad():
        router.gate.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-10]]))
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    assert routing.selected_expert_indices.tolist() == [[1]]
    expected = torch.tensor([[2.0**-10]]).sigmoid()
    torch.testing.assert_close(routing.selected_probabilities, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ((3, 1), r"8 experts can not be cut into 3 equal groups of two or more. Set num_groups to one of \[1, 2, 4\]"),
        ((8, 4), r"8 experts can not be cut into 8 equal groups"),
        ((4, 1), r"can not choose 3 experts from 1 of 4 groups of 2. Set num_selected_groups between 2 and 4"),
        ((4, 5), r"can not choose 3 experts from 5 of 4 groups"),
    ],
)
def test_groups_must_fit(limit: tuple[int, int], message: str):
    group_limit = ExpertGroupLimit(num_groups=limit[0], num_selected_groups=limit[1])
    with pytest.raises(ValueError, match=message):
        TopKRouter(6, 8, 3, True, routing=RoutingParameters(group_limit=group_limit))
