"""Heads: cut cross entropy against torch's on whole logits, in values, gradients and memory; pooling by hand."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.kernel.cut_cross_entropy import linear_cross_entropy_per_token
from d9d.module.block.head import (
    LM_IGNORE_INDEX,
    ClassificationHead,
    EmbeddingHead,
    SequenceCausalLMHeadShared,
    SequencePoolingHeadShared,
    SplitLanguageModellingHead,
)
from d9d.pipelining.backward import stage_backward_input, stage_backward_weight
from tests.d9d.module.block.oracles import FP32, FP64

SIZES, ORDER = {"regular": 300, "special": 5}, ["regular", "special"]
VOCABULARY = 305


def inputs(dtype: torch.dtype, num_tokens: int = 24) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(num_tokens, 8, generator=generator, dtype=torch.float64).to(dtype)
    weights = [torch.randn(SIZES[name], 8, generator=generator, dtype=torch.float64).to(dtype) for name in ORDER]
    labels = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    borders = torch.tensor([0, 127, 128, 299, 300, 304, LM_IGNORE_INDEX, LM_IGNORE_INDEX])[:num_tokens]
    labels[: len(borders)] = borders
    return hidden_states.requires_grad_(), [weight.requires_grad_() for weight in weights], labels


def reference(hidden_states: torch.Tensor, weights: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden_states, torch.cat(weights))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, ignore_index=LM_IGNORE_INDEX, reduction="none")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.float32, FP32)])
@pytest.mark.parametrize("piece_elements", [1, 24 * 150, 2**24])
def test_equals_cross_entropy(dtype: torch.dtype, tolerance: dict[str, float], piece_elements: int):
    hidden_states, weights, labels = inputs(dtype)
    losses = linear_cross_entropy_per_token(
        hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX, piece_elements=piece_elements
    )
    expected = reference(hidden_states, weights, labels)
    assert losses.dtype == dtype
    torch.testing.assert_close(losses, expected, **tolerance)
    # A weight of its own for each token, as in a loss that weights them.
    token_weights = torch.linspace(-1, 2, len(labels), dtype=dtype)
    leaves = [hidden_states, *weights]
    gradients = torch.autograd.grad((losses * token_weights).sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * token_weights).sum(), leaves), **tolerance)


def test_low_precision_rounds_like_whole_logits():
    hidden_states, weights, labels = inputs(torch.bfloat16)
    losses = linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX)
    expected = reference(hidden_states, weights, labels)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, **FP32)
    gradients = torch.autograd.grad(losses.sum(), [hidden_states, *weights])
    expected_gradients = torch.autograd.grad(expected.sum(), [hidden_states, *weights])
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, expected_gradient, rtol=2**-7, atol=2**-7)


def test_autocast_computes_forward_and_backward_in_its_dtype():
    hidden_states, weights, labels = inputs(torch.float32)
    leaves = [hidden_states, *weights]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX)
    low = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    expected = linear_cross_entropy_per_token(low[0], low[1:], labels, ignore_index=LM_IGNORE_INDEX)
    assert torch.equal(losses, expected)
    gradients = torch.autograd.grad(losses.sum(), leaves)
    for gradient, expected_gradient in zip(gradients, torch.autograd.grad(expected.sum(), low), strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected_gradient.float())


def test_extreme_logits():
    hidden_states = torch.tensor([[1000.0], [-1000.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    labels = torch.tensor([0, 0, 1])
    losses = linear_cross_entropy_per_token(hidden_states, [weight], labels, ignore_index=LM_IGNORE_INDEX)
    torch.testing.assert_close(losses, torch.tensor([0.0, 2000.0, math.log(2)]), **FP32)
    losses.sum().backward()
    # d loss / d h = (sum of probabilities times rows) minus the row of the label.
    torch.testing.assert_close(hidden_states.grad, torch.tensor([[0.0], [-2.0], [1.0]]), **FP32)


@pytest.mark.parametrize("labels", [[], [LM_IGNORE_INDEX] * 3])
def test_without_any_label(labels: list[int]):
    hidden_states, weights, _ = inputs(torch.float64, num_tokens=len(labels))
    losses = linear_cross_entropy_per_token(
        hidden_states, weights, torch.tensor(labels, dtype=torch.int64), ignore_index=LM_IGNORE_INDEX
    )
    assert losses.tolist() == [0.0] * len(labels)
    losses.sum().backward()
    for leaf in (hidden_states, *weights):
        assert not leaf.grad.any()


def test_a_nan_at_an_ignored_position_stays_out_of_the_loss():
    hidden_states, weights, labels = inputs(torch.float64)
    clean = linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX).detach()
    with torch.no_grad():
        hidden_states[6] = float("nan")
    losses = linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX)
    assert torch.equal(losses, clean)


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_labels_outside_the_vocabulary_show(label: int):
    hidden_states, weights, labels = inputs(torch.float64)
    labels[3] = label
    losses = linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX)
    assert losses.isinf().nonzero().tolist() == [[3]]


def test_frozen_weights_have_no_gradient():
    hidden_states, weights, labels = inputs(torch.float64)
    weights[0].requires_grad_(False)
    linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX).sum().backward()
    assert weights[0].grad is None
    assert weights[1].grad is not None


def test_halves_of_a_split_backward_pass_compute_their_own_gradients():
    hidden_states, weights, labels = inputs(torch.float64)
    leaves = [hidden_states, *weights]

    def gradients(*directions: GradDirection) -> tuple[torch.Tensor | None, ...]:
        loss = linear_cross_entropy_per_token(hidden_states, weights, labels, ignore_index=LM_IGNORE_INDEX).sum()
        with GLOBAL_GRAD_CONTEXT.with_directions(*directions):
            return torch.autograd.grad(loss, leaves, allow_unused=True)

    whole = gradients(*GradDirection)
    of_inputs, of_weights = gradients(GradDirection.inputs), gradients(GradDirection.weight)
    assert of_inputs[1:] == (None, None)
    assert of_weights[0] is None
    assert torch.equal(of_inputs[0], whole[0])
    assert torch.equal(of_weights[1], whole[1])
    assert torch.equal(of_weights[2], whole[2])


def test_pipeline_stages_can_split_it():
    hidden_states, weights, labels = inputs(torch.float64)
    scale = torch.full((8,), 2.0, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        return linear_cross_entropy_per_token(
            hidden_states * scale, weights, labels, ignore_index=LM_IGNORE_INDEX
        ).sum()

    expected = torch.autograd.grad(loss(), [hidden_states, scale, *weights])
    result = stage_backward_input([loss()], [None], [hidden_states], [scale, *weights])
    torch.testing.assert_close(result.input_grads[0], expected[0], **FP64)
    assert weights[0].grad is None
    stage_backward_weight([scale, *weights], result.param_groups)
    torch.testing.assert_close([leaf.grad for leaf in (scale, *weights)], list(expected[1:]), **FP64)


class LargestResult(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def test_no_operation_sees_more_logits_than_a_piece():
    num_tokens, num_words = 64, 4096
    hidden_states = torch.randn(num_tokens, 2, requires_grad=True)
    weight = torch.randn(num_words, 2, requires_grad=True)
    labels = torch.randint(num_words, (num_tokens,))
    with LargestResult() as sizes:
        linear_cross_entropy_per_token(
            hidden_states, [weight], labels, ignore_index=LM_IGNORE_INDEX, piece_elements=2**14
        ).sum().backward()
    assert sizes.largest == 2**14  # the logits are 2**18


MEMORY_SCRIPT = """
import resource
import torch
from d9d.module.block.head import SequenceCausalLMHeadShared, SplitLanguageModellingHead

torch.set_num_threads(1)
head = SplitLanguageModellingHead({"regular": 151936}, ["regular"], 32)
hidden_states = torch.randn(2, 2048, 32, requires_grad=True)
labels = torch.randint(151936, (2, 2048))
# Libraries load what they need for products on first use.
(torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).exp().sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
head(hidden_states, SequenceCausalLMHeadShared(labels=labels)).cross_entropy.mean().backward()
assert head.lm_head["regular"].weight.grad.isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_below_an_eighth_of_the_logits():
    # The path over whole logits holds three arrays of this size at its peak: logits, their softmax and its gradient.
    logits_bytes = 4096 * 151936 * 4
    output = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], check=True, capture_output=True, text=True).stdout
    assert int(output) < logits_bytes / 8


def test_language_modelling_head_joins_its_vocabularies():
    head = SplitLanguageModellingHead(SIZES, ORDER, 8).double()
    hidden_states = torch.randn(2, 3, 8, dtype=torch.float64)
    labels = torch.tensor([[0, 299, 300], [304, LM_IGNORE_INDEX, 7]])
    losses = head(hidden_states, SequenceCausalLMHeadShared(labels=labels)).cross_entropy
    table = torch.cat([head.lm_head["regular"].weight, head.lm_head["special"].weight])
    expected = F.cross_entropy((hidden_states @ table.T).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses, expected, **FP64)
    torch.testing.assert_close(head.logits(hidden_states), hidden_states @ table.T, **FP64)


def test_language_modelling_head_refuses_labels_of_another_shape():
    head = SplitLanguageModellingHead(SIZES, ORDER, 8)
    with pytest.raises(ValueError, match=r"labels have shape \(2, 4\)"):
        head(torch.randn(2, 3, 8), SequenceCausalLMHeadShared(labels=torch.zeros(2, 4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="exactly once"):
        SplitLanguageModellingHead(SIZES, ["regular"], 8)


STATES = torch.arange(24, dtype=torch.float64).view(2, 3, 4)  # row t of sequence b is 12 b + 4 t + (0, 1, 2, 3)
MASK = torch.tensor([[1, 0, 1], [0, 0, 0]])
POOLED = torch.tensor([[4.0, 5, 6, 7], [0, 0, 0, 0]], dtype=torch.float64)  # the mean of rows 0 and 2; of none


def test_embedding_head_pools_by_the_mean():
    shared = SequencePoolingHeadShared(pooling_mask=MASK)
    assert torch.equal(EmbeddingHead(4, None, False)(STATES, shared).embeddings, POOLED)
    head = EmbeddingHead(4, 2, True).double()
    projected = POOLED @ head.projection.weight.T
    expected = projected / projected.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    torch.testing.assert_close(head(STATES, shared).embeddings, expected, **FP64)


def test_without_mask_every_token_has_outputs():
    assert torch.equal(EmbeddingHead(4, None, False)(STATES, SequencePoolingHeadShared()).embeddings, STATES)
    head = ClassificationHead(4, 3, 0.0).double()
    scores = head(STATES, SequencePoolingHeadShared()).scores
    torch.testing.assert_close(scores, STATES @ head.score.weight.T, **FP64)


def test_what_the_mask_leaves_out_does_not_matter():
    states = STATES.clone()
    states[0, 1] = float("nan")
    states.requires_grad_()
    embeddings = EmbeddingHead(4, None, False)(states, SequencePoolingHeadShared(pooling_mask=MASK)).embeddings
    assert torch.equal(embeddings, POOLED)
    embeddings.sum().backward()
    assert states.grad[:, :, 0].tolist() == [[0.5, 0, 0.5], [0, 0, 0]]


def test_classification_head():
    head = ClassificationHead(4, 3, 0.5).double()
    shared = SequencePoolingHeadShared(pooling_mask=MASK.bool())
    torch.testing.assert_close(head.eval()(STATES, shared).scores, POOLED @ head.score.weight.T, **FP64)
    torch.manual_seed(0)
    assert not torch.equal(head.train()(STATES, shared).scores[0], head.eval()(STATES, shared).scores[0])
    with pytest.raises(ValueError, match=r"the mask has shape \(3, 2\)"):
        head(STATES, SequencePoolingHeadShared(pooling_mask=MASK.T))


@pytest.mark.parametrize(
    "head", [SplitLanguageModellingHead(SIZES, ORDER, 8), ClassificationHead(8, 2, 0.1), EmbeddingHead(8, 4, True)]
)
def test_reset_gives_every_parameter_a_value(head: torch.nn.Module):
    for parameter in head.parameters():
        parameter.data.fill_(float("nan"))
    head.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in head.parameters())
