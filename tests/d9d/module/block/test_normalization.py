"""RMSNorm against its formula and against the norms of transformers."""

import pytest
import torch

from d9d.module.base import ModuleLateInit
from d9d.module.block.normalization import RMSNorm
from tests.d9d.module.block.oracles import FP64, randomize


def test_formula():
    norm = RMSNorm(2, eps=0.0).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 10.0]))
    # The mean square of (3, 4) is 12.5.
    expected = torch.tensor([[2 * 3 / 12.5**0.5, 10 * 4 / 12.5**0.5]], dtype=torch.float64)
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]], dtype=torch.float64)), expected, **FP64)


def test_zero_centered_weight_is_added_to_one():
    norm = RMSNorm(3, zero_centered=True)
    plain = RMSNorm(3)
    assert norm.weight.tolist() == [0, 0, 0]
    assert plain.weight.tolist() == [1, 1, 1]
    x = torch.randn(4, 3)
    assert torch.equal(norm(x), plain(x))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients(zero_centered: bool):
    norm = RMSNorm(5, zero_centered=zero_centered).double()
    randomize(norm)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rounds_as_transformers_does(dtype: torch.dtype, zero_centered: bool):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = qwen3_next.Qwen3NextRMSNorm(64) if zero_centered else qwen3.Qwen3RMSNorm(64)
    ours = RMSNorm(64, zero_centered=zero_centered)
    randomize(theirs, scale=1.0)
    ours.weight.data.copy_(theirs.weight)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(dtype) * 30
    result = ours.to(dtype)(x)
    assert result.dtype == dtype
    assert torch.equal(result, theirs.to(dtype)(x))


def test_result_has_the_dtype_of_the_input():
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert RMSNorm(8)(x).dtype == torch.bfloat16
    assert RMSNorm(8)(x.double()).dtype == torch.float64


def test_large_values_of_half_precision_do_not_overflow():
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)  # its square is beyond fp16
    assert RMSNorm(8).half()(x).tolist() == [[1.0] * 8]


def test_late_init():
    norm = RMSNorm(4).to("meta").to_empty(device="cpu")
    assert isinstance(norm, ModuleLateInit)
    norm.weight.data.fill_(float("nan"))
    norm.reset_parameters()
    assert norm.weight.tolist() == [1, 1, 1, 1]
