"""SwiGLU against its formula and against transformers."""

import math

import pytest
import torch

from d9d.module.block.ffn import SwiGLU
from tests.d9d.module.block.oracles import FP64, assert_equal_gradients, copy_parameters, randomize


def test_formula():
    network = SwiGLU(1, 1).double()
    with torch.no_grad():
        for layer, value in ((network.gate_proj, 2.0), (network.up_proj, 3.0), (network.down_proj, 5.0)):
            layer.weight.fill_(value)
    x = 0.7
    expected = 5 * (2 * x / (1 + math.exp(-2 * x))) * (3 * x)
    assert network(torch.tensor([x], dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("bias", [False, True])
def test_equals_transformers(bias: bool):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=6, num_attention_heads=1, intermediate_size=10, mlp_bias=bias)
    theirs, ours = llama.LlamaMLP(config).double(), SwiGLU(6, 10, bias=bias).double()
    randomize(theirs)
    names = {name: name for name, _ in theirs.named_parameters()}
    copy_parameters(theirs, ours, names)
    x, x2 = (torch.randn(2, 3, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
    x2.data.copy_(x)
    result, expected = ours(x), theirs(x2)
    torch.testing.assert_close(result, expected, **FP64)
    weights = torch.randn(result.shape, dtype=torch.float64)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, **FP64)
    assert_equal_gradients(theirs, ours, names, FP64)


def test_reset_gives_every_parameter_a_value():
    network = SwiGLU(4, 8, bias=True).to("meta").to_empty(device="cpu")
    for parameter in network.parameters():
        parameter.data.fill_(float("nan"))
    network.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in network.parameters())
