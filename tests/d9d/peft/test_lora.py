"""Adapters on one process: against the peft package, by formulas, and in and out of model states."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from d9d.model_state.io import load_model_state, save_model_state
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.model_state.mapper.compose import ModelStateMapperSequential
from d9d.module.block.head import SplitLanguageModellingHead
from d9d.module.block.moe import GroupedLinear, MoELayer
from d9d.module.block.moe.grouped_mm import ExpertTokenGroups
from d9d.peft import inject_peft_and_freeze, merge_peft
from d9d.peft.all import PeftStack, PeftStackConfig, peft_method_from_config
from d9d.peft.full_tune import FullTune, FullTuneConfig
from d9d.peft.lora import LoRA, LoRAConfig, LoRAGroupedLinear, LoRALinear, LoRAParameters, mapper_to_merged
from tests.d9d.module.block.oracles import randomize

EXACT = {"rtol": 1e-13, "atol": 1e-13}
PARAMS = LoRAParameters(r=2, alpha=6, dropout=0.0)


class Net(nn.Module):
    """Two linear layers, of which one has a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x).tanh()))


def net() -> Net:
    model = Net().double()
    randomize(model)
    return model


def lora(pattern: str, params: LoRAParameters = PARAMS) -> LoRA:
    return LoRA.from_config(LoRAConfig(module_name_pattern=re.compile(pattern), params=params))


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_equals_the_peft_package():
    """Outputs, gradients of adapters and merged weights, with the same factors."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["up", "down"], init_lora_weights=False)
    theirs = peft.get_peft_model(net(), config)
    ours = net()
    method = lora("up|down")
    inject_peft_and_freeze(method, ours)
    factors = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in theirs.named_parameters()
        if "lora_" in name
    }
    with torch.no_grad():
        for name, parameter in factors.items():
            ours.get_parameter(name).copy_(parameter)
    x = inputs(4, 5)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    trained = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.requires_grad}
    torch.testing.assert_close(trained, {name: parameter.grad for name, parameter in factors.items()}, **EXACT)
    assert all(parameter.grad is None for name, parameter in ours.named_parameters() if name not in factors)
    merge_peft(method, ours)
    torch.testing.assert_close(ours.state_dict(), theirs.merge_and_unload().state_dict(), **EXACT)


def test_grouped_adapters_are_those_of_each_group():
    base = GroupedLinear(3, 4, 5, dtype=torch.float64)
    layer = LoRAGroupedLinear(base, PARAMS)
    randomize(layer)
    counts = [2, 0, 3]
    x = inputs(5, 4)
    output = layer(x, ExpertTokenGroups(torch.tensor(counts)))
    expected = [
        rows @ (base.weight[group] + 3 * layer.lora_A.weight[group] @ layer.lora_B.weight[group])
        for group, rows in enumerate(x.split(counts))
    ]
    torch.testing.assert_close(output, torch.cat(expected), **EXACT)
    merged = layer.merge_with_base_()
    assert merged is base
    torch.testing.assert_close(merged(x, ExpertTokenGroups(torch.tensor(counts))), output, **EXACT)


@pytest.mark.parametrize("kind", [nn.Linear, GroupedLinear])
def test_new_adapters_add_nothing(kind: type[nn.Module]):
    base: Any = nn.Linear(4, 6) if kind is nn.Linear else GroupedLinear(2, 4, 6)
    layer = LoRALinear(base, PARAMS) if kind is nn.Linear else LoRAGroupedLinear(base, PARAMS)
    rest = () if kind is nn.Linear else (ExpertTokenGroups(torch.tensor([2, 1])),)
    x = torch.randn(3, 4)
    assert torch.equal(layer(x, *rest), base(x, *rest))
    assert layer.lora_A.weight.abs().max() > 0
    assert layer.lora_A.weight.abs().max() <= 4**-0.5


def test_dropout_is_that_of_the_adapter_alone():
    base = nn.Linear(8, 8)
    layer = LoRALinear(base, LoRAParameters(r=2, alpha=2, dropout=0.5))
    randomize(layer)
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    output = layer(x)
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(output, base(x) + dropped @ layer.lora_A.weight.T @ layer.lora_B.weight.T)
    assert torch.equal(layer.eval()(x), layer(x))


def test_layer_with_two_names_gets_one_adapter():
    model = nn.ModuleDict({"a": nn.Linear(3, 3)})
    model["b"] = model["a"]
    method = lora("a|b")
    mapper = inject_peft_and_freeze(method, model)
    assert model["a"] is model["b"]
    assert {name for group in mapper.state_dependency_groups() for name in group.inputs} == {
        f"{name}.{own}" for name in "ab" for own in ("weight", "bias")
    }
    merge_peft(method, model)
    assert model["a"] is model["b"]
    assert isinstance(model["a"], nn.Linear)


def test_stack_and_full_tune():
    config = PeftStackConfig.model_validate(
        {
            "methods": [
                {"kind": "lora", "module_name_pattern": "up", "params": {"r": 1, "alpha": 1, "dropout": 0}},
                {"kind": "full_tune", "module_name_pattern": "head"},
            ]
        }
    )
    method = peft_method_from_config(config)
    assert isinstance(method, PeftStack)
    model = net()
    inject_peft_and_freeze(method, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"up.lora_A.weight", "up.lora_B.weight", "head.weight", "head.bias"}
    merge_peft(method, model)
    assert model.state_dict().keys() == net().state_dict().keys()


def test_model_states_go_in_and_come_out_merged(tmp_path: Path):
    """A file of the plain model is loaded into the one with adapters, and what is exported is the plain model again."""
    plain = net()
    save_model_state(tmp_path / "in", identity_mapper_from_module(plain), plain, show_progress=False)
    model = Net().double()
    method = lora("up|down")
    mapper = ModelStateMapperSequential([identity_mapper_from_module(model), inject_peft_and_freeze(method, model)])
    load_model_state(tmp_path / "in", mapper, "cpu", model, keep=["*.lora_[AB].weight"], show_progress=False)
    x = inputs(2, 5)
    assert torch.equal(model(x), plain(x))
    randomize(model)
    save_model_state(tmp_path / "out", mapper_to_merged(model), model, show_progress=False)
    merge_peft(method, model)
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict(), rtol=0, atol=0)


def test_merging_rounds_once():
    """Neither the product nor the sum is rounded to 16 bits before it is added."""
    layer = LoRALinear(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), LoRAParameters(r=8, alpha=8, dropout=0.0))
    randomize(layer)
    weight, first, second = (
        each.detach().double() for each in (layer.base.weight, layer.lora_B.weight, layer.lora_A.weight)
    )
    expected = (weight + first @ second).to(torch.bfloat16)
    merged = mapper_to_merged(nn.Sequential(layer)).apply(
        {f"0.{name}": tensor for name, tensor in layer.state_dict().items()}
    )
    torch.testing.assert_close(merged["0.weight"], expected, rtol=0, atol=0)
    torch.testing.assert_close(layer.merge_with_base_().weight.detach(), expected, rtol=0, atol=0)


def test_whatever_cannot_be_adapted_is_refused():
    with pytest.raises(ValueError, match=r"matches no linear layer, but mlp, a Tanh"):
        lora("mlp").inject(nn.ModuleDict({"mlp": nn.Tanh()}))
    with pytest.raises(NotImplementedError, match=r"lm_head\.a can have no adapter: SplitLanguageModellingHead"):
        lora(".*").inject(SplitLanguageModellingHead({"a": 4}, ["a"], 4))
    with pytest.raises(NotImplementedError, match=r"router\.gate can have no adapter"):
        lora(".*").inject(MoELayer(4, 4, 2, 1, True))
    with pytest.raises(NotImplementedError, match=r"embed can have no adapter: it is an embedding.*FullTune"):
        lora(".*").inject(nn.ModuleDict({"embed": nn.Embedding(3, 4), "q_proj": nn.Linear(4, 4)}))
    encoder = nn.TransformerEncoderLayer(4, 2, 8)
    for pattern, name in (("linear1", "linear1"), (r".*out_proj", r"self_attn\.out_proj")):
        with pytest.raises(NotImplementedError, match=rf"{name} can have no adapter: TransformerEncoderLayer computes"):
            lora(pattern).inject(encoder)
    with pytest.raises(NotImplementedError, match=r"out_proj can have no adapter: MultiheadAttention computes"):
        lora("out_proj").inject(nn.MultiheadAttention(4, 2))
    model = net()
    inject_peft_and_freeze(lora("up"), model)
    with pytest.raises(ValueError, match=r"up\.base is a part of a layer that has an adapter"):
        lora(".*").inject(model)


def test_tied_layers_are_refused():
    """Merged into one weight, an adapter would change the embedding as well, or the adapter of another layer."""
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False), "q": nn.Linear(4, 4)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(
        NotImplementedError, match=r"head can have no adapter: its weight is that of embed too.*FullTune"
    ):
        lora("q|head").inject(model)
    assert type(model["q"]) is nn.Linear
    lora("q").inject(model)
    layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    layers["b"].weight = layers["a"].weight
    with pytest.raises(NotImplementedError, match=r"b can have no adapter: its weight is that of a too"):
        lora("a|b").inject(layers)


def test_pattern_without_a_match_is_told(caplog: pytest.LogCaptureFixture):
    FullTune(FullTuneConfig(module_name_pattern=re.compile("haed"))).inject(net())
    assert "'haed' matches no module" in caplog.text
    assert "'head'" in caplog.text
