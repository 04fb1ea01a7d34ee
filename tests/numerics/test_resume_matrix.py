"""Resuming on any other mesh: states bit for bit as they were saved, and the same training as without a break."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.harness.plugin import OnRanks
from tests.numerics.model_runs import Layout
from tests.numerics.resumed_jobs import SUBJECTS, forget_later_checkpoints, resume, train_and_save

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
"""What the project promises for a job that goes on elsewhere."""

DENSE, MOE, ODD = "qwen3 dense", "qwen3 moe", "odd shapes"
PP = {"pipeline_parallel": 2}
LAYOUTS: dict[str, Layout] = {
    "1": Layout(degrees={}),
    "replicate 2": Layout(degrees={"data_parallel_replicate": 2}),
    "shard 2": Layout(degrees={"data_parallel_shard": 2}),
    "tp 2": Layout(degrees={"tensor_parallel": 2}),
    "pp 2": Layout(degrees=PP, schedule="1f1b"),
    "pp 2, two stages each": Layout(degrees=PP, schedule="zero_bubble_v"),
    "ep 2": Layout(degrees={"data_parallel_replicate": 2, "expert_parallel": 2}),
    "shard 4": Layout(degrees={"data_parallel_shard": 4}),
    "hsdp 2 x 2": Layout(degrees={"data_parallel_replicate": 2, "data_parallel_shard": 2}),
    "tp 2 x shard 2": Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2}),
    "tp 2 x replicate 2": Layout(degrees={"tensor_parallel": 2, "data_parallel_replicate": 2}),
    "pp 4": Layout(degrees={"pipeline_parallel": 4}, schedule="1f1b"),
    "pp 2 x tp 2": Layout(degrees={**PP, "tensor_parallel": 2}, schedule="1f1b"),
    "pp 2 x ep 2": Layout(degrees={**PP, "data_parallel_shard": 2, "expert_parallel": 2}, schedule="1f1b"),
}
"""Each to each, in exhaustive runs."""
FURTHER_LAYOUTS: dict[str, Layout] = {
    "cp 2, shards": Layout(degrees={"context_parallel_shard": 2}, context_method="all_gather"),
    "cp 2, replicas": Layout(degrees={"context_parallel_replicate": 2}),
    "cp 2 x shard 2": Layout(degrees={"context_parallel_shard": 2, "data_parallel_shard": 2}),
    "pp 2 x cp 2": Layout(degrees={**PP, "context_parallel_shard": 2}, schedule="1f1b"),
    "pp 2, interleaved": Layout(degrees=PP, schedule="interleaved"),
    "pp 2 x shard 2, in a V": Layout(degrees={**PP, "data_parallel_shard": 2}, schedule="zero_bubble_v"),
    "ep 2 x tp 2": Layout(
        degrees={"data_parallel_shard": 2, "expert_parallel": 2, "tensor_parallel": 2}, sequence_parallel=True
    ),
    "ep 2 x cp 2": Layout(degrees={"data_parallel_shard": 2, "context_parallel_shard": 2, "expert_parallel": 2}),
    "ep 4": Layout(degrees={"data_parallel_shard": 4, "expert_parallel": 4}),
}
"""To and from some others, in exhaustive runs."""
ALL_LAYOUTS = LAYOUTS | FURTHER_LAYOUTS
CELLS: dict[tuple[str, str], list[str]] = {
    (DENSE, "pp 4"): ["1", "pp 2, two stages each", "shard 4", "tp 2"],
    (DENSE, "tp 2 x shard 2"): ["replicate 2", "pp 2 x tp 2", "tp 2 x replicate 2"],
    (ODD, "1"): ["shard 4"],
    (ODD, "shard 4"): ["hsdp 2 x 2", "shard 2", "1"],
    (MOE, "1"): ["pp 2 x ep 2"],
    (MOE, "ep 2"): ["shard 2", "1"],
}
"""What runs each time, in fp64: meshes to go on with, by subject and mesh that saves. All else is exhaustive."""
OF_STAGES = ["1", "shard 2", "tp 2", "pp 2", "pp 2, interleaved", "pp 2, two stages each", "pp 4", "pp 2 x tp 2"]
OF_EXPERTS = ["1", "shard 2", "ep 2", "ep 4", "ep 2 x tp 2", "pp 2 x ep 2"]
OF_SHARDS = ["1", "replicate 2", "shard 2", "shard 4", "hsdp 2 x 2"]
FURTHER_SUBJECTS: dict[str, tuple[list[str], torch.dtype]] = {
    "tied": (OF_STAGES, torch.float64),
    "groups": (OF_STAGES, torch.float64),
    "llama": (["1", "tp 2 x shard 2", "pp 2, two stages each"], torch.float64),
    "deepseek v3": (OF_EXPERTS, torch.float64),
    "odd shapes, sgd": (OF_SHARDS, torch.float64),
    "odd shapes, groups": (OF_SHARDS, torch.float64),
    "odd shapes, stochastic adamw": (OF_SHARDS, torch.bfloat16),
    "odd shapes, muon": (["1", "replicate 2"], torch.float64),
}
"""Each of these meshes to each, in exhaustive runs."""


def fits(subject: str, layout: str) -> bool:
    degrees = ALL_LAYOUTS[layout].degrees.keys()
    if subject == ODD:
        return all(degree.startswith("data_parallel") for degree in degrees)
    return subject == MOE or "expert_parallel" not in degrees


def exhaustive(subject: str, saved: str, resumed: Sequence[str], dtype: torch.dtype, of: str) -> object:
    name = f"{subject}, {saved}, {of}, {str(dtype).removeprefix('torch.')}"
    return pytest.param(subject, saved, resumed, dtype, id=name, marks=pytest.mark.exhaustive)


def cases() -> list[object]:
    few = [
        pytest.param(subject, saved, resumed, torch.float64, id=f"{subject}, {saved}")
        for (subject, saved), resumed in CELLS.items()
    ]
    to_each = [
        exhaustive(subject, saved, fitting, dtype, "all")
        for dtype in TOLERANCES
        for subject in (DENSE, MOE, ODD)
        for fitting in [[layout for layout in LAYOUTS if fits(subject, layout)]]
        for saved in fitting
    ]
    to_further = [
        exhaustive(subject, saved, fitting, torch.float64, "further")
        for subject in (DENSE, MOE)
        for fitting in [[layout for layout in [*FURTHER_LAYOUTS, "shard 2", "pp 2 x tp 2"] if fits(subject, layout)]]
        for saved in fitting
    ]
    further = [
        exhaustive(subject, saved, layouts, dtype, "some")
        for subject, (layouts, dtype) in FURTHER_SUBJECTS.items()
        for saved in layouts
    ]
    return few + to_each + to_further + further


@pytest.mark.timeout_s(900)
@pytest.mark.parametrize(("subject", "saved", "resumed", "dtype"), cases())
def test_another_mesh_goes_on(
    tmp_path: Path, on_ranks: OnRanks, subject: str, saved: str, resumed: list[str], dtype: torch.dtype
):
    layout, own = ALL_LAYOUTS[saved], SUBJECTS[subject].tolerance
    on_ranks(layout.mesh.world_size, train_and_save, subject=subject, layout=layout, dtype=dtype, folder=tmp_path)
    forget_later_checkpoints(tmp_path)
    for name in resumed:
        other = ALL_LAYOUTS[name]
        on_ranks(
            other.mesh.world_size,
            resume,
            subject=subject,
            layout=other,
            dtype=dtype,
            folder=tmp_path,
            tolerance=TOLERANCES[dtype] if own is None else own,
        )
