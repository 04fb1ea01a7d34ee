"""What all decoders do alike: names, first values, what is kept of hidden states, checkpointing, refusals."""

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from d9d.core.types import TensorSpec
from d9d.internals.materialize import materialize_module
from d9d.model_state.io import load_model_state, save_model_state
from d9d.module.base import ModuleLateInit
from d9d.module.block.head import ClassificationHead, EmbeddingHead, SplitLanguageModellingHead
from d9d.module.model import (
    SINGLE_HEAD_PREFIX,
    AnyHeadConfig,
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderWithHeads,
    build_decoder_head,
)
from d9d.module.model.io import SequenceInput, SequenceShared, SequenceTransfer
from d9d.module.model.parameters import AnyRopeScalingConfig, build_rope_scaling
from d9d.module.model.qwen3_dense import (
    mapper_from_huggingface_qwen3_dense_for_causal_lm,
    mapper_to_huggingface_qwen3_dense_for_causal_lm,
)
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from tests.d9d.module.block.oracles import FP64, randomize
from tests.d9d.module.model.catalogue import CATALOGUE, HIDDEN, LAYERS, VOCAB, tokens
from tests.harness.pipelines import build_whole, run_whole

WHOLE = PipelineStageInfo(0, 1)
ALL = pytest.mark.parametrize("name", CATALOGUE)
DENSE = CATALOGUE["qwen3 dense"]


def shared_of(ids: torch.Tensor, mask: torch.Tensor | None = None) -> SequenceShared:
    return SequenceShared(position_ids=torch.arange(ids.shape[1]).expand_as(ids), hidden_states_agg_mask=mask)


@ALL
@pytest.mark.parametrize("tied", [False, True])
def test_first_values(name: str, tied: bool):
    """On the meta device, and the same for a stage as for the whole model."""
    states: list[dict[str, torch.Tensor]] = []
    for num_stages in (1, 2):
        state: dict[str, torch.Tensor] = {}
        for index in range(num_stages):
            stage = PipelineStageInfo(index, num_stages)
            with torch.device("meta"):
                model = DecoderForCausalLM(CATALOGUE[name].build(tied, stage), stage)
            materialize_module(model, torch.device("cpu"), seed=3)  # fails if something has no value
            state |= model.state_dict()
        states.append(state)
    whole, cut = states
    assert whole.keys() == cut.keys()
    for parameter, value in whole.items():
        assert value.isfinite().all()
        if not (tied and parameter.startswith("head.")):  # which the pipeline gets from the embeddings
            assert torch.equal(value, cut[parameter]), parameter
    assert (
        torch.equal(whole["head.lm_head.added.weight"], whole["backbone.embed_tokens.token_embedding.added.weight"])
        == tied
    )


@ALL
def test_hidden_states_that_are_kept(name: str):
    """By the means over tokens of what each layer gives; over two stages as in one."""
    row, ids = CATALOGUE[name], tokens()
    mask = (tokens(seed=1) > 10).long()
    whole = row.build(False, mode="mean").double()
    randomize(whole)
    outputs: list[torch.Tensor] = []
    for layer in whole.decoder_layers:
        layer.register_forward_hook(lambda _, args, output: outputs.append(output))
    transfer = whole(SequenceInput(input_ids=ids), shared_of(ids, mask))
    weights = mask.double() / mask.sum(1, keepdim=True)
    expected = torch.stack([torch.einsum("bt,bth->bh", weights, output) for output in outputs])
    torch.testing.assert_close(transfer.hidden_states_snapshot, expected, **FP64)

    stages = build_whole(2, lambda stage: row.build(False, stage, mode="mean").double())
    for stage in stages:
        stage.load_state_dict({key: value for key, value in whole.state_dict().items() if key in stage.state_dict()})
    cut = run_whole(stages, SequenceInput(input_ids=ids), shared_of(ids, mask))
    torch.testing.assert_close(cut.hidden_states_snapshot, expected, **FP64)
    torch.testing.assert_close(cut.hidden_states, transfer.hidden_states, **FP64)


@pytest.mark.parametrize("mode", ["no", "mean"])
def test_what_crosses_boundaries_is_what_the_specs_say(mode: str):
    ids = tokens(3, 5)
    transfer: Any = SequenceInput(input_ids=ids)
    incoming: Any = None
    for index in range(4):  # the first and the last have no layers
        stage = DENSE.build(False, PipelineStageInfo(index, 4), mode=mode)
        if index:
            assert stage.stage_transfer_spec(SequenceInput(input_ids=ids), StageBoundary.incoming) == incoming
        transfer = stage(transfer, shared_of(ids))
        incoming = stage.stage_transfer_spec(SequenceInput(input_ids=ids), StageBoundary.outgoing)
        assert incoming.hidden_states == TensorSpec(tuple(transfer.hidden_states.shape), torch.float32)
        snapshot = transfer.hidden_states_snapshot
        assert incoming.hidden_states_snapshot == (
            None if snapshot is None else TensorSpec(tuple(snapshot.shape), torch.float32)
        )
    assert transfer.hidden_states.shape == (3, 5, HIDDEN)
    assert mode == "no" or transfer.hidden_states_snapshot.shape == (LAYERS, 3, HIDDEN)


@ALL
def test_checkpointing_changes_nothing(name: str):
    ids = tokens()
    gradients: list[dict[str, torch.Tensor]] = []
    for checkpointed in (False, True):
        model = CATALOGUE[name].build(False, checkpointed=checkpointed).double()
        randomize(model)
        calls: list[int] = []
        model.decoder_layers[0].self_attn.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(SequenceInput(input_ids=ids), shared_of(ids)).hidden_states.sin().sum().backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
        assert len(calls) == (2 if checkpointed else 1)
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


def test_stages_refuse_the_input_of_others():
    first, last = (DENSE.build(False, PipelineStageInfo(index, 2)) for index in range(2))
    ids = tokens()
    with pytest.raises(TypeError, match="stage 1 of 2 takes a SequenceTransfer, not a SequenceInput"):
        last(SequenceInput(input_ids=ids), shared_of(ids))
    with pytest.raises(TypeError, match="stage 0 of 2 takes a SequenceInput, not a SequenceTransfer"):
        first(SequenceTransfer(hidden_states=torch.zeros(2, 8, HIDDEN)), shared_of(ids))


def test_heads_by_config():
    backbone = DENSE.build(False)
    head_of = TypeAdapter[AnyHeadConfig](AnyHeadConfig).validate_python
    lm = build_decoder_head(head_of({"kind": "causal_lm"}), backbone=backbone)
    assert isinstance(lm, SplitLanguageModellingHead)
    assert {name: len(weight) for name, weight in lm.named_parameters()} == {
        f"lm_head.{name}.weight": size for name, size in VOCAB.items()
    }
    classes = build_decoder_head(head_of({"kind": "classification", "num_labels": 3}), backbone=backbone)
    assert isinstance(classes, ClassificationHead)
    assert classes.score.weight.shape == (3, HIDDEN)
    vectors = build_decoder_head(head_of({"kind": "embedding", "embedding_dim": 4}), backbone=backbone)
    assert isinstance(vectors, EmbeddingHead)
    assert isinstance(vectors, ModuleLateInit)
    with pytest.raises(ValidationError):
        head_of({"kind": "classification", "num_labels": 0})


def test_names_of_a_stage():
    stage = PipelineStageInfo(1, 2)
    model = DecoderForCausalLM(DENSE.build(False, stage), stage)
    names = set(model.state_dict())
    assert f"{SINGLE_HEAD_PREFIX}lm_head.added.weight" in names
    assert "backbone.norm.weight" in names
    assert "backbone.layers.1.mlp.up_proj.weight" in names
    assert not any("layers.0." in name or "embed" in name for name in names)


def test_embeddings_are_tied_to_one_head_that_predicts_tokens():
    model = DecoderForClassification(DENSE.build(True), ClassificationHeadConfig(num_labels=2), WHOLE)
    assert model.tied_parameters() == {}
    backbone = DENSE.build(True)
    heads = {name: build_decoder_head(CausalLMHeadConfig(), backbone=backbone) for name in ("a", "b")}
    with pytest.raises(NotImplementedError, match="2 heads predict tokens"):
        DecoderWithHeads(backbone, heads, WHOLE)


def test_stages_load_and_export_their_parts(tmp_path):
    """Tied weights are in the file once, and both stages read them; heads of several have a prefix of their own."""
    params = DENSE.params(True)
    model = DecoderForCausalLM(DENSE.build(True), WHOLE)
    randomize(model)
    save_model_state(tmp_path, mapper_to_huggingface_qwen3_dense_for_causal_lm(params), model, show_progress=False)
    exports: list[set[str]] = []
    for index in range(2):
        stage = PipelineStageInfo(index, 2)
        backbone = DENSE.build(True, stage)
        heads = {"lm": build_decoder_head(CausalLMHeadConfig(), backbone=backbone)}
        part = DecoderWithHeads(backbone, heads, stage)
        load = mapper_from_huggingface_qwen3_dense_for_causal_lm(params, head_prefix="heads.lm", stage=stage)
        with pytest.warns(UserWarning, match="are not read"):  # by this stage
            load_model_state(tmp_path, load, "cpu", part, show_progress=False)
        for name, value in part.state_dict().items():
            assert torch.equal(value, model.state_dict()[name.replace("heads.lm.", "head.")]), name
        export = mapper_to_huggingface_qwen3_dense_for_causal_lm(params, head_prefix="heads.lm.", stage=stage)
        exports.append({name for group in export.state_dependency_groups() for name in group.outputs})
    assert not exports[0] & exports[1]
    whole = mapper_to_huggingface_qwen3_dense_for_causal_lm(params).state_dependency_groups()
    assert exports[0] | exports[1] == {name for group in whole for name in group.outputs}
    assert "lm_head.weight" not in exports[0] | exports[1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_a_file_with_or_without_a_head(tied: bool, head: str, tmp_path):
    """Shared where it is absent or equal; an error that names it where it is missing or another one; nothing is drawn."""
    untied = DecoderForCausalLM(DENSE.build(False), WHOLE)
    randomize(untied)
    if head == "equal":
        untied.head.load_state_dict(
            {f"lm_head.{name}.weight": untied.backbone.embed_tokens.token_embedding[name].weight for name in VOCAB}
        )
    # Files of a tied model have no head.
    export = mapper_to_huggingface_qwen3_dense_for_causal_lm(DENSE.params(head == "absent"))
    save_model_state(tmp_path, export, untied, show_progress=False)
    model = DecoderForCausalLM(DENSE.build(tied), WHOLE)
    load = mapper_from_huggingface_qwen3_dense_for_causal_lm(DENSE.params(tied))
    if (tied, head) in ((True, "different"), (False, "absent")):
        with pytest.raises((ValueError, RuntimeError), match=r"lm_head\.weight"):
            load_model_state(tmp_path, load, "cpu", model, show_progress=False)
        return
    load_model_state(tmp_path, load, "cpu", model, show_progress=False)
    wanted = untied.backbone.embed_tokens.token_embedding if head != "different" else untied.head.lm_head
    for name in VOCAB:
        assert torch.equal(model.head.lm_head[name].weight, wanted[name].weight)
    assert (model.head.lm_head["added"].weight is model.backbone.embed_tokens.token_embedding["added"].weight) == tied


def test_rope_scaling_by_config():
    """Against the formulas: all frequencies over the factor; ends of the others' ranges."""
    config_of = TypeAdapter[AnyRopeScalingConfig](AnyRopeScalingConfig).validate_python
    plain = build_rope_scaling(None).inverse_frequencies(10000, 8)
    torch.testing.assert_close(plain, 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8))
    linear = build_rope_scaling(config_of({"kind": "linear", "factor": 4.0}))
    torch.testing.assert_close(linear.inverse_frequencies(10000, 8), plain / 4)
    ntk = build_rope_scaling(config_of({"kind": "ntk", "factor": 4.0})).inverse_frequencies(10000, 8)
    torch.testing.assert_close(ntk[[0, -1]], plain[[0, -1]] / torch.tensor([1.0, 4.0], dtype=torch.float64))
    stretched = {"factor": 4.0, "original_max_position_embeddings": 128}
    llama3 = build_rope_scaling(config_of({"kind": "llama3", **stretched})).inverse_frequencies(10000, 8)
    torch.testing.assert_close(llama3[[0, -1]], plain[[0, -1]] / torch.tensor([1.0, 4.0], dtype=torch.float64))
    yarn = build_rope_scaling(config_of({"kind": "yarn", **stretched, "mscale": 1.0, "mscale_all_dim": 2.0}))
    torch.testing.assert_close(yarn.inverse_frequencies(10000, 8)[-1], plain[-1] / 4)
    assert yarn.attention_mscale == (0.1 * math.log(4) + 1) / (0.2 * math.log(4) + 1)
