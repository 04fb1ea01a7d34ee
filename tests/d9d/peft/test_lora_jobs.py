"""Fine-tuning jobs from files to files: as by transformers with the package peft, resumed, and on other meshes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.d9d.module.block.oracles import EverythingInDouble
from tests.d9d.module.model.catalogue import tokens
from tests.d9d.peft.lora_jobs import (
    METHODS,
    NUM_STEPS,
    collected,
    load_theirs,
    resume,
    train,
    train_theirs,
    write_source,
)
from tests.harness.parity import assert_close_tree
from tests.harness.plugin import OnRanks
from tests.numerics.model_runs import Layout
from tests.numerics.resumed_jobs import SAVED_AFTER, forget_later_checkpoints

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

TOLERANCE = {"rtol": 0.0, "atol": 1e-10}
LAYOUTS = {
    "1": Layout(degrees={}),
    "shard 2": Layout(degrees={"data_parallel_shard": 2}),
    "tp 2": Layout(degrees={"tensor_parallel": 2}, sequence_parallel=True),
    "pp 2": Layout(degrees={"pipeline_parallel": 2}, schedule="1f1b"),
    "pp 2 x tp 2": Layout(degrees={"pipeline_parallel": 2, "tensor_parallel": 2}, schedule="1f1b"),
}
CELLS = [
    ("adapters", "tp 2", ["tp 2", "shard 2"]),
    ("adapters and the head", "pp 2", ["pp 2", "1"]),
    ("adapters and the head", "shard 2", ["shard 2", "1"]),
]
"""What runs each time: method, mesh, and meshes to go on with. All else is exhaustive."""


def cases() -> list[object]:
    few = [pytest.param(*cell, id=f"{cell[0]}, {cell[1]}") for cell in CELLS]
    return few + [
        pytest.param(method, layout, list(LAYOUTS), id=f"{method}, {layout}, all", marks=pytest.mark.exhaustive)
        for method in METHODS
        for layout in LAYOUTS
    ]


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("method", "name", "resumed"), cases())
def test_jobs_train_as_transformers_with_peft(
    tmp_path: Path, on_ranks: OnRanks, method: str, name: str, resumed: list[str]
):
    layout = LAYOUTS[name]
    write_source(tmp_path)
    on_ranks(layout.mesh.world_size, train, method=method, layout=layout, folder=tmp_path)
    found = collected(tmp_path, "whole")
    theirs, losses, expected = train_theirs(method, tmp_path, found.start)
    assert_close_tree(dataclasses.asdict(found), dataclasses.asdict(expected), **TOLERANCE)
    assert losses_of(tmp_path / "whole") == pytest.approx(dict(enumerate(losses, 1)), rel=0, abs=TOLERANCE["atol"])

    ids = tokens()
    with EverythingInDouble(), torch.no_grad():
        logits = theirs(input_ids=ids).logits
        merged = load_theirs(tmp_path / "merged")(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(load_theirs(tmp_path / "source"), tmp_path / "adapter")
        read = adapted.double().eval()(input_ids=ids).logits
        base = load_theirs(tmp_path / "source")(input_ids=ids).logits
    assert (logits - base).abs().max() > 0.01  # else the tolerance would say nothing
    torch.testing.assert_close(merged, logits, **TOLERANCE)
    torch.testing.assert_close(read, logits, **TOLERANCE)

    forget_later_checkpoints(tmp_path)
    for index, other in enumerate(resumed):
        on_ranks(
            LAYOUTS[other].mesh.world_size,
            resume,
            method=method,
            layout=LAYOUTS[other],
            folder=tmp_path,
            name=f"to{index}",
        )
        rest = collected(tmp_path, f"to{index}")
        assert_close_tree(rest.start, found.values[SAVED_AFTER - 1], rtol=0.0, atol=0.0)
        tolerance = {"rtol": 0.0, "atol": 0.0} if other == name else TOLERANCE
        assert_close_tree(rest.values, found.values[SAVED_AFTER:], **tolerance)
        assert losses_of(tmp_path / f"to{index}") == pytest.approx(
            {step: losses[step - 1] for step in range(SAVED_AFTER + 1, NUM_STEPS + 1)}, rel=0, abs=TOLERANCE["atol"]
        )


def losses_of(folder: Path) -> dict[int, float]:
    points = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {point["step"]: point["value"] for point in points if point.get("name") == "loss"}
