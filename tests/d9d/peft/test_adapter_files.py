"""What can not be in the files of the package peft is refused by its name, before anything is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import ModelStateMapperCast, ModelStateMapperRename, ModelStateMapperTranspose
from d9d.module.model import DecoderForCausalLM, DecoderForEmbedding, EmbeddingHeadConfig
from d9d.peft import inject_peft_and_freeze
from d9d.peft.adapter_files import mapper_to_adapters, write_peft_adapter
from d9d.peft.all import PeftStackConfig, peft_method_from_config
from d9d.pipelining.api import PipelineStageInfo
from tests.d9d.module.model.catalogue import CATALOGUE, HIDDEN

WHOLE = PipelineStageInfo(0, 1)
QUERIES = r"(backbone\.)?layers\.\d\.self_attn\.q_proj"


def method(adapters: str, whole: str | None = None, *, r: tuple[int, ...] = (2,)) -> PeftStackConfig:
    methods: list[dict[str, Any]] = [
        {"kind": "lora", "module_name_pattern": adapters, "params": {"r": each, "alpha": 2, "dropout": 0.0}}
        for each in r
    ]
    if whole is not None:
        methods.append({"kind": "full_tune", "module_name_pattern": whole})
    return PeftStackConfig.model_validate({"methods": methods})


def map_adapters(
    module: nn.Module, export: ModelStateMapper, adapters: str, whole: str | None = None
) -> ModelStateMapper:
    inject_peft_and_freeze(peft_method_from_config(method(adapters, whole)), module)
    return mapper_to_adapters(module, export)


def decoder(family: str, *, tied: bool = False) -> tuple[nn.Module, ModelStateMapper]:
    row = CATALOGUE[family]
    with torch.device("meta"):
        return DecoderForCausalLM(row.build(tied), WHOLE), row.mapper(row.causal_lm.export, tied)


class OneLayer(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.up = nn.Linear(in_features, out_features, bias=False, device="meta")


def test_experts():
    model, export = decoder("qwen3 moe")
    with pytest.raises(NotImplementedError, match=r"grouped_experts\.down_proj holds all experts of a layer"):
        map_adapters(model, export, r".*\.grouped_experts\.down_proj")
    model, export = decoder("qwen3 moe")
    with pytest.raises(NotImplementedError, match=r"grouped_experts\.down_proj holds all experts of a layer"):
        map_adapters(model, export, QUERIES, r".*\.grouped_experts\.down_proj")


def test_tied_weights():
    model, export = decoder("qwen3 dense", tied=True)
    with pytest.raises(NotImplementedError, match=r"embed_tokens\S* has the weight of another module"):
        map_adapters(model, export, QUERIES, r"backbone\.embed_tokens")


def test_a_layer_that_trains_beside_its_adapter():
    model, export = decoder("qwen3 dense")
    with pytest.raises(
        NotImplementedError, match=r"backbone\.layers\.1\.self_attn\.q_proj trains in full beside its adapter"
    ):
        map_adapters(model, export, QUERIES, r"backbone\.layers\.1\.self_attn\.q_proj\.base")


@pytest.mark.parametrize("out_features", [4, 6])
def test_a_layer_that_is_another_one_there(out_features: int):
    transposed = ModelStateMapperTranspose("up.weight", (0, 1))
    with pytest.raises(NotImplementedError, match=r"up is no linear layer by itself there \(up.weight -> up.weight\)"):
        map_adapters(OneLayer(4, out_features), transposed, "up")
    with pytest.raises(NotImplementedError, match=r"up is no linear layer by itself there \(it is not mapped\)"):
        map_adapters(OneLayer(4, out_features), ModelStateMapperRename("down.weight", "w"), "up")


def test_a_layer_of_any_size_that_has_another_name_there():
    """Nothing of the size of the weight, which no memory has, is made."""
    export = ModelStateMapperSequential(
        [
            ModelStateMapperRename("up.weight", "their.up.weight"),
            ModelStateMapperParallel([ModelStateMapperCast("their.up.weight", torch.bfloat16)]),
        ]
    )
    mapper = map_adapters(OneLayer(2**21, 2**21), export, "up")
    assert {name for group in mapper.state_dependency_groups() for name in group.outputs} == {
        "base_model.model.their.up.lora_A.weight",
        "base_model.model.their.up.lora_B.weight",
    }


def test_a_module_whose_name_ends_names_of_others():
    """Of ``norm`` the package would make all norms."""
    row = CATALOGUE["qwen3 dense"]
    export = row.mapper(row.backbone.export, False)
    for stage in (WHOLE, PipelineStageInfo(3, 4)):  # the latter has no layers itself
        with torch.device("meta"):
            backbone = row.build(False, stage)
        with pytest.raises(NotImplementedError, match=r"norm ends the name of layers\.0\.input_layernorm there"):
            map_adapters(backbone, export, QUERIES, "norm")


def test_a_module_that_transformers_does_not_have():
    row = CATALOGUE["qwen3 dense"]
    for adapters, whole in [(QUERIES, r"head\.projection"), (r"head\.projection", None)]:
        with torch.device("meta"):
            model = DecoderForEmbedding(row.build(False), EmbeddingHeadConfig(embedding_dim=4), WHOLE)
        export = row.mapper(row.embedding.export, False, embedding_dim=4)
        with pytest.raises(NotImplementedError, match=r"head\.projection\S* is head\.projection\.weight there, which"):
            map_adapters(model, export, adapters, whole)


def test_several_sizes(tmp_path: Path):
    with pytest.raises(NotImplementedError, match=r'adapters of one size, and the method has \{"r":2.*"r":3'):
        write_peft_adapter(tmp_path, tmp_path / "adapter", method(QUERIES, r=(2, 3)))


def test_an_export_of_another_method(tmp_path: Path):
    layer = "base_model.model.layers.0.self_attn.q_proj"
    factors = {f"{layer}.lora_A.weight": torch.ones(3, HIDDEN), f"{layer}.lora_B.weight": torch.ones(HIDDEN, 3)}
    save_file(factors, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"holds adapters of the widths \[3\], which is no export of adapters with r = 2"
    ):
        write_peft_adapter(tmp_path, tmp_path / "adapter", method(QUERIES))
    save_file({**factors, "norm.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds norm\.weight, which is no export of adapters with r = 3"):
        write_peft_adapter(tmp_path, tmp_path / "adapter", method(QUERIES, r=(3,)))
    assert not (tmp_path / "adapter").exists()
