"""Padding, stacking and pooling masks."""

import pytest
import torch

from d9d.dataset import PaddingSide1D, TokenPoolingType, pad_stack_1d, token_pooling_mask_from_attention_mask

ITEMS = [torch.tensor([1, 2, 3]), torch.tensor([4])]


@pytest.mark.parametrize(
    ("side", "multiple", "expected"),
    [
        (PaddingSide1D.right, None, [[1, 2, 3], [4, 0, 0]]),
        (PaddingSide1D.left, None, [[1, 2, 3], [0, 0, 4]]),
        (PaddingSide1D.right, 2, [[1, 2, 3, 0], [4, 0, 0, 0]]),
        (PaddingSide1D.right, 3, [[1, 2, 3], [4, 0, 0]]),
        ("left", 4, [[0, 1, 2, 3], [0, 0, 0, 4]]),
    ],
)
def test_pad_stack(side, multiple, expected):
    assert pad_stack_1d(ITEMS, pad_value=0, padding_side=side, pad_to_multiple_of=multiple).tolist() == expected


def test_padding_keeps_the_dtype():
    stacked = pad_stack_1d([torch.tensor([True]), torch.tensor([True, True])], pad_value=0)
    assert stacked.dtype is torch.bool
    assert stacked.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("items", "multiple", "message"),
    [
        ([], None, "items is empty"),
        (ITEMS, 0, r"pad_to_multiple_of \(0\)"),
        ([torch.zeros(2, 2)], None, r"items\[0\] has shape \(2, 2\)"),
    ],
)
def test_what_cannot_be_stacked_is_refused(items, multiple, message):
    with pytest.raises(ValueError, match=message):
        pad_stack_1d(items, pad_value=0, pad_to_multiple_of=multiple)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (TokenPoolingType.all, [[1, 1, 0], [0, 1, 1], [0, 0, 0]]),
        (TokenPoolingType.first, [[1, 0, 0], [0, 1, 0], [0, 0, 0]]),
        (TokenPoolingType.last, [[0, 1, 0], [0, 0, 1], [0, 0, 0]]),
    ],
)
def test_pooling_masks_with_padding_on_either_side(pooling, expected):
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    marked = token_pooling_mask_from_attention_mask(mask, pooling)
    assert marked.tolist() == expected
    assert marked.dtype == mask.dtype


def test_a_mask_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\): it must be \(B, T\)"):
        token_pooling_mask_from_attention_mask(torch.ones(3), TokenPoolingType.all)
