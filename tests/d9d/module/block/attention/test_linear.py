"""The gated delta rule against its recurrence, the gated delta net against Qwen3-Next of transformers."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from d9d.module.block.attention.linear import (
    AnyDecayGateParameters,
    GatedDeltaNet,
    LogSigmoidDecayGateParameters,
    MambaDecayGateParameters,
)
from d9d.module.block.attention.linear.decay_gate import build_decay_gate
from d9d.module.block.attention.linear.delta_rule import chunked_gated_delta_rule
from tests.d9d.module.block.oracles import FP64, EverythingInDouble, randomize

FP32_SCAN = {"rtol": 1e-4, "atol": 1e-5}  # a solved system and a product of many decays, in fp32 in other orders
MAMBA = MambaDecayGateParameters(normalizer=1.0, dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4)


def rule_inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, num_tokens, *shape, generator=generator, dtype=torch.float64)

    q, k, v = random(4), random(4), random(5)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decays = -random().square()
    if num_tokens > 2:
        log_decays[:, :, num_tokens // 2] = -500.0  # forgets all: exp overflows if ratios are taken the other way
    return [tensor.to(dtype).requires_grad_() for tensor in (q, k, v, log_decays, random().sigmoid())]


def recurrence(q, k, v, log_decays, strengths):
    """The rule as it is written, token by token."""
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(v.shape[2]):
        state = log_decays[:, :, t].exp()[..., None, None] * state
        missing = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], strengths[:, :, t, None] * missing)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_chunks_equal_the_recurrence(num_tokens: int, chunk_size: int):
    inputs = rule_inputs(num_tokens)
    result, expected = chunked_gated_delta_rule(*inputs, chunk_size), recurrence(*inputs)
    torch.testing.assert_close(result, expected, **FP64)
    torch.testing.assert_close(
        torch.autograd.grad(result.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs), **FP64
    )


def test_low_precision_is_computed_in_fp32():
    inputs = rule_inputs(30, torch.bfloat16)
    result = chunked_gated_delta_rule(*inputs, 8)
    assert result.dtype == torch.bfloat16
    expected = recurrence(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=2**-8)


def test_no_tokens():
    assert chunked_gated_delta_rule(*rule_inputs(0)).shape == (2, 3, 0, 5)


HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 12, 2, 4, 6, 5


def build_net(**kwargs) -> GatedDeltaNet:
    arguments = {"norm_eps": 1e-5, "conv_size": 3, "decay_gate": MAMBA} | kwargs
    return GatedDeltaNet(HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, **arguments)


def split_theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of transformers under our names: theirs hold q, k, v and gate of each key head side by side."""
    values_of_key_head = VALUE_HEADS // KEY_HEADS * VALUE_DIM
    qkvz = tensors["in_proj_qkvz.weight"].view(KEY_HEADS, -1, HIDDEN)
    q, k, v, z = (
        part.reshape(-1, HIDDEN)
        for part in qkvz.split((KEY_DIM, KEY_DIM, values_of_key_head, values_of_key_head), dim=1)
    )
    b, a = (part.reshape(-1, HIDDEN) for part in tensors["in_proj_ba.weight"].view(KEY_HEADS, 2, -1, HIDDEN).unbind(1))
    keys = KEY_HEADS * KEY_DIM
    q_conv, k_conv, v_conv = tensors["conv1d.weight"].split((keys, keys, VALUE_HEADS * VALUE_DIM))
    return {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "gate_proj.weight": z,
        "strength_proj.weight": b,
        "decay_gate.proj.weight": a,
        "decay_gate.log_rate": tensors["A_log"],
        "decay_gate.dt_bias": tensors["dt_bias"],
        "q_conv.conv.weight": q_conv,
        "k_conv.conv.weight": k_conv,
        "v_conv.conv.weight": v_conv,
        "norm.weight": tensors["norm.weight"],
        "o_proj.weight": tensors["out_proj.weight"],
    }


def make_theirs() -> nn.Module:
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-5,
    )
    theirs = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    randomize(theirs)
    return theirs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.float32, FP32_SCAN)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_equals_qwen3_next(dtype: torch.dtype, tolerance: dict[str, float], is_padded: bool):
    theirs, ours = make_theirs().to(dtype), build_net().to(dtype)
    parameters = dict(ours.named_parameters())
    expected_values = split_theirs({name: value.detach() for name, value in theirs.named_parameters()})
    assert set(parameters) == set(expected_values)
    with torch.no_grad():
        for name, value in expected_values.items():
            parameters[name].copy_(value)
    states = torch.randn(2, 70, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, x2 = (states.to(dtype).clone().requires_grad_() for _ in range(2))
    mask = None
    if is_padded:
        mask = torch.ones(2, 70, dtype=torch.int64)
        mask[1, :9] = 0
    if dtype == torch.float64:
        with EverythingInDouble():
            expected = theirs(x2, attention_mask=mask)
    else:
        expected = theirs(x2, attention_mask=mask)
    result = ours(x, mask)
    torch.testing.assert_close(result, expected, **tolerance)
    expected.sin().sum().backward()
    result.sin().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, **tolerance)
    gradients = split_theirs({name: value.grad for name, value in theirs.named_parameters()})
    for name, gradient in gradients.items():
        torch.testing.assert_close(parameters[name].grad, gradient, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_padding_in_front_changes_nothing_and_later_tokens_are_not_seen():
    net = build_net().double()
    randomize(net)
    x = torch.randn(1, 6, HIDDEN, dtype=torch.float64)
    result = net(x)
    padded = torch.cat((torch.full((1, 3, HIDDEN), float("nan"), dtype=torch.float64), x), dim=1)
    mask = torch.tensor([[False] * 3 + [True] * 6])
    torch.testing.assert_close(net(padded, mask)[:, 3:], result, **FP64)
    later = x.clone()
    later[:, 4:] += 1.0
    torch.testing.assert_close(net(later)[:, :4], result[:, :4], **FP64)


def test_gates_by_formula():
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    gate = build_decay_gate(4, 2, LogSigmoidDecayGateParameters(normalizer=16.0)).double()
    expected = -torch.log1p(torch.exp(-(x @ gate.proj.weight.T))) / 16
    torch.testing.assert_close(gate(x), expected, **FP64)
    gate = build_decay_gate(4, 2, MAMBA.model_copy(update={"normalizer": 2.0})).double()
    step = torch.log1p(torch.exp(x @ gate.proj.weight.T + gate.dt_bias))
    torch.testing.assert_close(gate(x), -gate.log_rate.exp() * step / 2, **FP64)


def test_new_mamba_gates_have_the_steps_asked_for():
    torch.manual_seed(0)
    params = MambaDecayGateParameters(normalizer=1.0, dt_min=0.001, dt_max=0.1, dt_init_floor=0.004)
    gate = build_decay_gate(4, 4000, params).double()
    gate.reset_parameters()
    steps = torch.nn.functional.softplus(gate.dt_bias)
    assert steps.min().item() == pytest.approx(0.004, rel=1e-9)
    assert 0.09 < steps.max().item() <= 0.1 + 1e-12
    # log10 of the step is even from -3 to -1: a share of log10(4) / 2 lies below the floor.
    share = (steps < 0.004 * (1 + 1e-9)).double().mean().item()
    assert share == pytest.approx(math.log10(4) / 2, abs=0.03)
    rates = gate.log_rate.exp()
    assert 0.01 <= rates.min() < 0.1
    assert 15.9 < rates.max() <= 16


def test_without_l2_norm_queries_scale_the_read():
    net = build_net(use_qk_l2norm=False).double()
    randomize(net)
    normed = build_net().double()
    normed.load_state_dict(net.state_dict())
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64)
    assert not torch.allclose(net(x), normed(x))
    assert net(x).isfinite().all()


@pytest.mark.parametrize("decay_gate", [MAMBA, LogSigmoidDecayGateParameters(normalizer=16.0)])
def test_late_init(decay_gate: AnyDecayGateParameters):
    with torch.device("meta"):
        net = build_net(decay_gate=decay_gate)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        parameter.data.fill_(float("nan"))
    net.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_mistakes_are_named():
    with pytest.raises(
        ValueError, match=r"num_value_heads \(4\) must be a positive multiple of num_query_key_heads \(3\)"
    ):
        GatedDeltaNet(HIDDEN, 3, 4, KEY_DIM, VALUE_DIM, 1e-5, 3, MAMBA)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 5, 5\)"):
        build_net()(torch.randn(1, 5, HIDDEN), torch.ones(1, 1, 5, 5))
    adapter = TypeAdapter(AnyDecayGateParameters)
    assert adapter.validate_python(MAMBA.model_dump()) == MAMBA
    for wrong in ({"type": "mamba"}, {"type": "logsigmoid", "normalizer": 0.0}, {"normalizer": 1.0}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
