"""Resuming on any other mesh: states bit for bit as they were saved, and the same training as without a break."""

from pathlib import Path

import pytest
import torch

from tests.harness.plugin import OnRanks
from tests.numerics.model_runs import Layout
from tests.numerics.resumed_jobs import ODD, forget_later_checkpoints, resume, train_and_save

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
"""What the project promises for a job that goes on elsewhere."""

DENSE, MOE = "qwen3 dense", "qwen3 moe"
LAYOUTS: dict[str, Layout] = {
    "1": Layout(degrees={}),
    "replicate 2": Layout(degrees={"data_parallel_replicate": 2}),
    "shard 2": Layout(degrees={"data_parallel_shard": 2}),
    "tp 2": Layout(degrees={"tensor_parallel": 2}),
    "pp 2": Layout(degrees={"pipeline_parallel": 2}, schedule="1f1b"),
    "pp 2, two stages each": Layout(degrees={"pipeline_parallel": 2}, schedule="zero_bubble_v"),
    "ep 2": Layout(degrees={"data_parallel_replicate": 2, "expert_parallel": 2}),
    "shard 4": Layout(degrees={"data_parallel_shard": 4}),
    "hsdp 2 x 2": Layout(degrees={"data_parallel_replicate": 2, "data_parallel_shard": 2}),
    "tp 2 x shard 2": Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2}),
    "tp 2 x replicate 2": Layout(degrees={"tensor_parallel": 2, "data_parallel_replicate": 2}),
    "pp 4": Layout(degrees={"pipeline_parallel": 4}, schedule="1f1b"),
    "pp 2 x tp 2": Layout(degrees={"pipeline_parallel": 2, "tensor_parallel": 2}, schedule="1f1b"),
    "pp 2 x ep 2": Layout(
        degrees={"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}, schedule="1f1b"
    ),
}
CELLS: dict[tuple[str, str], list[str]] = {
    (DENSE, "pp 4"): ["1", "pp 2, two stages each", "shard 4", "tp 2"],
    (DENSE, "tp 2 x shard 2"): ["replicate 2", "pp 2 x tp 2", "tp 2 x replicate 2"],
    (ODD, "1"): ["shard 4"],
    (ODD, "shard 4"): ["hsdp 2 x 2", "shard 2", "1"],
    (MOE, "1"): ["pp 2 x ep 2"],
    (MOE, "ep 2"): ["shard 2", "1"],
}
"""What runs each time, in fp64: meshes to go on with, by model and mesh that saves. All else is exhaustive."""


def fits(model: str, layout: str) -> bool:
    degrees = LAYOUTS[layout].degrees.keys()
    if model == ODD:
        return all(degree.startswith("data_parallel") for degree in degrees)
    return model == MOE or "expert_parallel" not in degrees


def cases() -> list[object]:
    few = [
        pytest.param(model, saved, resumed, torch.float64, id=f"{model}, {saved}")
        for (model, saved), resumed in CELLS.items()
    ]
    all_of_them = [
        pytest.param(
            model,
            saved,
            [layout for layout in LAYOUTS if fits(model, layout)],
            dtype,
            id=f"{model}, {saved}, all, {str(dtype).removeprefix('torch.')}",
            marks=pytest.mark.exhaustive,
        )
        for dtype in TOLERANCES
        for model in (DENSE, MOE, ODD)
        for saved in LAYOUTS
        if fits(model, saved)
    ]
    return few + all_of_them


@pytest.mark.timeout_s(900)
@pytest.mark.parametrize(("model", "saved", "resumed", "dtype"), cases())
def test_another_mesh_goes_on(
    tmp_path: Path, on_ranks: OnRanks, model: str, saved: str, resumed: list[str], dtype: torch.dtype
):
    layout = LAYOUTS[saved]
    on_ranks(layout.mesh.world_size, train_and_save, model=model, layout=layout, dtype=dtype, folder=tmp_path)
    forget_later_checkpoints(tmp_path)
    for name in resumed:
        other = LAYOUTS[name]
        on_ranks(
            other.mesh.world_size,
            resume,
            model=model,
            layout=other,
            dtype=dtype,
            folder=tmp_path,
            tolerance=TOLERANCES[dtype],
        )
