"""Every model of the catalogue equals transformers: logits, losses, gradients, and files in both directions."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from d9d.model_state.io import load_model_state, save_model_state
from d9d.model_state.mapper import ModelStateMapper
from d9d.module.block.head import LM_IGNORE_INDEX, SequenceCausalLMHeadShared, SequencePoolingHeadShared
from d9d.module.model import (
    ClassificationHeadConfig,
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderForEmbedding,
    DecoderWithHeads,
    EmbeddingHeadConfig,
    build_decoder_head,
)
from d9d.module.model.io import SequenceHeadShared, SequenceInput, SequenceShared
from d9d.pipelining.api import PipelineStageInfo
from tests.d9d.module.block.oracles import EverythingInDouble, randomize
from tests.d9d.module.model.catalogue import CATALOGUE, HIDDEN, VARIANTS, Row, tokens

pytest.importorskip("transformers")

WHOLE = PipelineStageInfo(0, 1)
TOLERANCES = {torch.float32: {"rtol": 0.0, "atol": 1e-5}, torch.float64: {"rtol": 0.0, "atol": 1e-10}}
"""What the issue asks of logits and gradients, as the largest difference."""
MODELS = {**CATALOGUE, **VARIANTS}
ALL = pytest.mark.parametrize("name", MODELS)
BOTH_TIES = pytest.mark.parametrize("tied", [False, True])
BOTH_DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES))


def positions(ids: torch.Tensor) -> SequenceShared:
    return SequenceShared(position_ids=torch.arange(ids.shape[1]).expand_as(ids))


def mapped(mapper: ModelStateMapper, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Apply a mapper to tensors in memory, all of which must be read; gradients have none of buffers."""
    groups = mapper.state_dependency_groups()
    assert set(state) <= {name for group in groups for name in group.inputs}
    result: dict[str, torch.Tensor] = {}
    for group in groups:
        if not group.inputs.isdisjoint(state):
            result |= mapper.apply({name: state[name] for name in group.inputs if name in state})
    return result


def build_theirs(row: Row, kind: str, tied: bool, dtype: torch.dtype, **config: Any) -> nn.Module:
    with everything(dtype):
        model = row.build_theirs(kind, tied, **config).to(dtype)
    randomize(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # which is zero at first; here it decides about some choices
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)).roll(3))
    return model


def everything(dtype: torch.dtype) -> Any:
    """Let transformers compute in fp64 throughout, if asked."""
    return EverythingInDouble() if dtype == torch.float64 else nullcontext()


def filled(model: nn.Module, mapper: ModelStateMapper, theirs: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a model the weights of one of transformers."""
    model.to(dtype).load_state_dict(mapped(mapper, theirs.state_dict()))
    return model


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.roll(-1, 1)
    labels[:, -1] = LM_IGNORE_INDEX
    return labels


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden_states = model.backbone(SequenceInput(input_ids=ids), positions(ids)).hidden_states
    return model.head.logits(hidden_states)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, **TOLERANCES[dtype], msg=lambda m, n=name: f"{n}: {m}")


@ALL
@BOTH_TIES
@BOTH_DTYPES
def test_logits_losses_and_gradients(name: str, tied: bool, dtype: torch.dtype):
    row, ids = MODELS[name], tokens()
    theirs = build_theirs(row, "ForCausalLM", tied, dtype)
    load = row.mapper(row.causal_lm.load, tied, in_memory=True)
    ours: Any = filled(DecoderForCausalLM(row.build(tied), WHOLE), load, theirs, dtype)
    with everything(dtype):
        expected = theirs(ids).logits
    tolerance = TOLERANCES[dtype]
    assert expected.dtype == dtype
    assert expected.std() > 0.1  # else the tolerance would say nothing
    torch.testing.assert_close(logits_of(ours, ids), expected, **tolerance)

    labels = labels_of(ids)
    shared = SequenceHeadShared(sequence=positions(ids), head=SequenceCausalLMHeadShared(labels=labels))
    losses = ours(SequenceInput(input_ids=ids), shared).cross_entropy
    expected_losses = F.cross_entropy(expected.mT, labels, reduction="none", ignore_index=LM_IGNORE_INDEX)
    torch.testing.assert_close(losses, expected_losses, **tolerance)
    num_labels = (labels != LM_IGNORE_INDEX).sum()
    (losses.sum() / num_labels).backward()
    with everything(dtype):
        (expected_losses.sum() / num_labels).backward()
    wanted = mapped(load, gradients(theirs))
    if tied:  # one parameter under two names, of which named_parameters() gives the first
        wanted = {name: gradient for name, gradient in wanted.items() if not name.startswith("head.")}
    assert_close_gradients(gradients(ours), wanted, dtype)


@ALL
@BOTH_DTYPES
def test_hidden_states_of_a_padded_batch(name: str, dtype: torch.dtype):
    """Padding at the left, which causality alone does not hide; through the mappers of the model without heads."""
    row, ids = MODELS[name], tokens()
    theirs = build_theirs(row, "Model", False, dtype)
    ours = filled(row.build(False), row.mapper(row.backbone.load, False, in_memory=True), theirs, dtype)
    keep = torch.ones_like(ids)
    keep[0, :3] = 0
    position_ids = (keep.cumsum(1) - 1).clamp(min=0)
    with everything(dtype):
        expected = theirs(ids, attention_mask=keep, position_ids=position_ids).last_hidden_state
    mask = keep[:, None, None, :].bool()
    transfer = ours(SequenceInput(input_ids=ids), SequenceShared(position_ids=position_ids, attention_mask=mask))
    is_token = keep.bool()
    torch.testing.assert_close(transfer.hidden_states[is_token], expected[is_token], **TOLERANCES[dtype])


@ALL
@BOTH_DTYPES
def test_scores_of_sequences(name: str, dtype: torch.dtype):
    row, ids = MODELS[name], tokens()
    if row.classification is None:
        pytest.skip("transformers has no such class")
    theirs = build_theirs(row, "ForSequenceClassification", False, dtype, num_labels=3, pad_token_id=0)
    load = row.mapper(row.classification.load, False, in_memory=True)
    model = DecoderForClassification(row.build(False), ClassificationHeadConfig(num_labels=3), WHOLE)
    ours = filled(model, load, theirs, dtype)
    ids = ids.clamp(min=1)  # without padding
    pooling_mask = torch.zeros_like(ids)
    pooling_mask[:, -1] = 1
    scores = ours(SequenceInput(input_ids=ids), pooled(ids, pooling_mask)).scores
    labels = torch.arange(len(ids))
    F.cross_entropy(scores, labels).backward()
    with everything(dtype):
        expected = theirs(ids).logits
        F.cross_entropy(expected, labels).backward()
    torch.testing.assert_close(scores, expected, **TOLERANCES[dtype])
    assert_close_gradients(gradients(ours), mapped(load, gradients(theirs)), dtype)


@ALL
@BOTH_DTYPES
def test_vectors_of_sequences(name: str, dtype: torch.dtype):
    """Means over some of the tokens, of length one."""
    row, ids = MODELS[name], tokens()
    theirs = build_theirs(row, "Model", False, dtype)
    load = row.mapper(row.embedding.load, False, in_memory=True)
    model = DecoderForEmbedding(row.build(False), EmbeddingHeadConfig(normalize=True), WHOLE)
    ours = filled(model, load, theirs, dtype)
    mask = (tokens(seed=1) > 10).long()
    vectors = ours(SequenceInput(input_ids=ids), pooled(ids, mask)).embeddings
    weights = torch.linspace(-1, 1, HIDDEN, dtype=dtype)
    (vectors * weights).sum().backward()
    with everything(dtype):
        means = torch.stack([states[keep].mean(0) for states, keep in zip(theirs(ids)[0], mask.bool(), strict=True)])
        expected = means / means.norm(dim=-1, keepdim=True)
        (expected * weights).sum().backward()
    torch.testing.assert_close(vectors, expected, **TOLERANCES[dtype])
    assert_close_gradients(gradients(ours), mapped(load, gradients(theirs)), dtype)


def pooled(ids: torch.Tensor, mask: torch.Tensor) -> SequenceHeadShared[SequencePoolingHeadShared]:
    return SequenceHeadShared(sequence=positions(ids), head=SequencePoolingHeadShared(pooling_mask=mask))


class Records(logging.Handler):
    """Keeps the text of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def no_warnings_of_transformers() -> Iterator[None]:
    records, logger = Records(), logging.getLogger("transformers")
    logger.addHandler(records)
    try:
        with warnings.catch_warnings(action="error"):
            yield
    finally:
        logger.removeHandler(records)
    assert records.texts == []


def load_theirs(theirs: nn.Module, directory: Path) -> Any:
    """Load what lies in a directory as transformers does, which must find what it expects and nothing else."""
    with no_warnings_of_transformers():
        loaded, info = type(theirs).from_pretrained(
            directory, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
        )
    assert not any(info.values()), info
    return loaded.eval()


def saved_by_transformers(theirs: Any, directory: Path, **kwargs: Any) -> Path:
    theirs.save_pretrained(directory, **kwargs)
    return directory


def exported(ours: nn.Module, mapper: ModelStateMapper, theirs: Any, directory: Path) -> Path:
    save_model_state(directory, mapper, ours, show_progress=False)
    theirs.config.save_pretrained(directory)
    return directory


@ALL
@BOTH_TIES
def test_files_in_both_directions(name: str, tied: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    row, ids = MODELS[name], tokens()
    theirs = build_theirs(row, "ForCausalLM", tied, torch.float32)
    source = saved_by_transformers(theirs, tmp_path / "theirs")
    ours: Any = DecoderForCausalLM(row.build(tied), WHOLE)
    load_model_state(source, row.mapper(row.causal_lm.load, tied), "cpu", ours, show_progress=False)
    expected = theirs(ids).logits
    torch.testing.assert_close(logits_of(ours, ids), expected, **TOLERANCES[torch.float32])
    for experts_format in row.formats or (None,):
        arguments = () if experts_format is None else (experts_format,)
        mapper = row.causal_lm.export(row.params(tied), *arguments)
        directory = exported(ours, mapper, theirs, tmp_path / f"ours-{experts_format}")
        loaded = load_theirs(theirs, directory)
        for tensor_name, tensor in theirs.state_dict().items():
            assert torch.equal(loaded.state_dict()[tensor_name], tensor), tensor_name
        torch.testing.assert_close(loaded(ids).logits, expected, **TOLERANCES[torch.float32])
    assert not [w for w in recwarn if "model state" in str(w.message)]


@ALL
@pytest.mark.parametrize("kind", ["classification", "embedding", "backbone"])
def test_files_of_other_heads(name: str, kind: str, tmp_path: Path):
    row = MODELS[name]
    mappers = {"classification": row.classification, "embedding": row.embedding, "backbone": row.backbone}[kind]
    if mappers is None:
        pytest.skip("transformers has no such class")
    suffix, settings = ("ForSequenceClassification", {"num_labels": 3}) if kind == "classification" else ("Model", {})
    theirs = build_theirs(row, suffix, False, torch.float32, **settings)
    source = saved_by_transformers(theirs, tmp_path / "theirs")
    backbone = row.build(False)
    ours = {
        "classification": lambda: DecoderForClassification(backbone, ClassificationHeadConfig(num_labels=3), WHOLE),
        "embedding": lambda: DecoderForEmbedding(backbone, EmbeddingHeadConfig(), WHOLE),
        "backbone": lambda: backbone,
    }[kind]()
    load_model_state(source, row.mapper(mappers.load, False), "cpu", ours, show_progress=False)
    directory = exported(ours, row.mapper(mappers.export, False), theirs, tmp_path / "ours")
    loaded = load_theirs(theirs, directory)
    for tensor_name, tensor in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[tensor_name], tensor), tensor_name


@ALL
def test_a_projection_to_vectors_keeps_its_name(name: str, tmp_path: Path):
    """transformers has no place for it, but our own mapper reads it back."""
    row = MODELS[name]
    config = EmbeddingHeadConfig(embedding_dim=5)
    first, second = (DecoderForEmbedding(row.build(False), config, WHOLE) for _ in range(2))
    for seed, model in enumerate((first, second)):
        randomize(model, seed)
    save_model_state(tmp_path, row.mapper(row.embedding.export, False, embedding_dim=5), first, show_progress=False)
    load = row.mapper(row.embedding.load, False, embedding_dim=5)
    load_model_state(tmp_path, load, "cpu", second, show_progress=False)
    for tensor_name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[tensor_name], tensor), tensor_name
    assert second.state_dict()["head.projection.weight"].shape == (5, HIDDEN)
    third = row.build(False)
    several = DecoderWithHeads(third, {"vectors": build_decoder_head(config, backbone=third)}, WHOLE)
    load = row.mapper(row.embedding.load, False, embedding_dim=5, head_prefix="heads.vectors")
    load_model_state(tmp_path, load, "cpu", several, show_progress=False)
    assert torch.equal(several.heads["vectors"].projection.weight, first.head.projection.weight)
    (tmp_path / "again").mkdir()
    export = row.mapper(row.embedding.export, False, embedding_dim=5, head_prefix="heads.vectors.")
    save_model_state(tmp_path / "again", export, several, show_progress=False)
    load_model_state(tmp_path / "again", load, "cpu", several, show_progress=False)
