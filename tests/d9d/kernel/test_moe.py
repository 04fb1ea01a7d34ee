"""Tokens to experts by masks, against loops over tokens and experts, and values counted by hand."""

import pytest
import torch

from d9d.kernel.moe import fused_indices_to_multihot, moe_permute_with_probs, moe_unpermute_mask
from tests.d9d.module.block.oracles import FP64

# Tokens with 2, 1, 0 and 3 experts; expert 1 has none.
MASK = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]])
SLOTS = [(0, 0), (3, 0), (0, 2), (3, 2), (1, 3), (3, 3)]  # (token, expert), by hand


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_multihot():
    indices, probs = torch.tensor([[2, 0], [3, -1], [-1, -1]]), values(3, 2)
    mask, wide = fused_indices_to_multihot(indices, probs, 4)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    p = probs.detach()
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[0, 2], expected[0, 0], expected[1, 3] = p[0, 0], p[0, 1], p[1, 0]
    assert torch.equal(wide, expected)
    weights = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    (gradient,) = torch.autograd.grad((wide * weights).sum(), probs)
    assert gradient.tolist() == [[2, 0], [7, 0], [0, 0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused_indices_to_multihot(torch.tensor([[4]]), torch.ones(1, 1), 4)


@pytest.mark.parametrize("num_out_tokens", [-1, 6, 4, 8, 0])
def test_permute(num_out_tokens: int):
    tokens, probs = values(4, 3), values(4, 4, seed=1)
    slots, slot_probs, rows = moe_permute_with_probs(tokens, probs, MASK, num_out_tokens)
    num_slots = 6 if num_out_tokens < 0 else num_out_tokens
    kept = SLOTS[:num_slots]
    missing = num_slots - len(kept)
    right = (
        torch.stack([tokens[token] for token, _ in kept] + [torch.zeros(3, dtype=torch.float64)] * missing)
        if (num_slots)
        else tokens[:0]
    )
    right_probs = (
        torch.stack([probs[slot] for slot in kept] + [probs.new_zeros(())] * missing) if num_slots else probs[0, :0]
    )
    assert torch.equal(slots, right)
    assert torch.equal(slot_probs, right_probs)
    assert {(t, e): rows[t, e].item() for t in range(4) for e in range(4) if rows[t, e] >= 0} == {
        slot: row for row, slot in enumerate(kept)
    }
    weights, prob_weights = values(num_slots, 3, seed=2).detach(), values(num_slots, seed=3).detach()
    for found, expected in zip(
        torch.autograd.grad((slots * weights).sum() + (slot_probs * prob_weights).sum(), (tokens, probs)),
        torch.autograd.grad((right * weights).sum() + (right_probs * prob_weights).sum(), (tokens, probs)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **FP64)


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("num_out_tokens", [6, 4, 8])
def test_unpermute(has_probs: bool, num_out_tokens: int):
    _, _, rows = moe_permute_with_probs(values(4, 3), values(4, 4), MASK.bool(), num_out_tokens)
    outputs, probs = values(num_out_tokens, 3, seed=4), values(4, 4, seed=5)
    kept = list(enumerate(SLOTS[:num_out_tokens]))
    right = torch.zeros(4, 3, dtype=torch.float64)
    for row, slot in kept:
        one = torch.zeros(4, 1, dtype=torch.float64)
        one[slot[0]] = 1
        right = right + one * outputs[row] * (probs[slot] if has_probs else 1)
    result = moe_unpermute_mask(outputs, rows, probs if has_probs else None, torch.Size((4, 3)))
    torch.testing.assert_close(result, right, **FP64)
    inputs = (outputs, probs) if has_probs else (outputs,)
    weights = values(4, 3, seed=6).detach()
    for found, expected in zip(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((right * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **FP64)


def test_there_and_back_without_tokens_and_in_bfloat16():
    slots, probs, rows = moe_permute_with_probs(torch.ones(0, 3), torch.ones(0, 4), torch.ones(0, 4).bool())
    assert slots.shape == (0, 3)
    assert probs.shape == (0,)
    assert moe_unpermute_mask(slots, rows, torch.ones(0, 4)).shape == (0, 3)
    for num_slots in (0, 2):  # as many as a static layout has
        tokens, wide = values(0, 3), values(0, 4)
        slots, probs, rows = moe_permute_with_probs(tokens, wide, torch.ones(0, 4), num_slots)
        assert torch.equal(slots, torch.zeros(num_slots, 3, dtype=torch.float64))
        assert torch.equal(probs, torch.zeros(num_slots, dtype=torch.float64))
        assert moe_unpermute_mask(slots, rows, wide).shape == (0, 3)
        gradients = torch.autograd.grad(slots.sum() + probs.sum(), (tokens, wide))
        assert [each.shape for each in gradients] == [(0, 3), (0, 4)]
    # 256 + 1 is no number of bfloat16: only sums in fp32 come to 258.
    outputs = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert moe_unpermute_mask(outputs, torch.tensor([[0, 1, 2]])).tolist() == [[258.0]]
    with pytest.raises(
        ValueError, match=r"restore_shape is \(2, 1\), but \(1, 3\) rows of slots \(3, 1\) give \(1, 1\)"
    ):
        moe_unpermute_mask(outputs, torch.tensor([[0, 1, 2]]), None, torch.Size((2, 1)))
