"""Models of the catalogue on every mesh against one process: five losses, all gradients and parameters of the first step."""

import pytest
import torch

from tests.harness.parity import assert_close_tree
from tests.numerics.model_runs import Layout, Provider, TiedProvider, run_engine, run_plainly

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""What the project promises for sums in another order, as the largest difference."""
EMBEDDINGS, HEAD = "backbone.embed_tokens.token_embedding.", "head.lm_head."
LIMIT_S = 240.0  # each operation of a split layer goes through DTensor, in Python

DENSE, MOE = "qwen3 dense", "qwen3 moe"
PIPELINE = {"pipeline_parallel": 2}
LAYOUTS: dict[str, Layout] = {
    "1": Layout(degrees={}),
    "tp 2": Layout(degrees={"tensor_parallel": 2}),
    "tp 2, parts of sequences": Layout(degrees={"tensor_parallel": 2}, sequence_parallel=True),
    "shard 2": Layout(degrees={"data_parallel_shard": 2}),
    "replicate 2": Layout(degrees={"data_parallel_replicate": 2}),
    "cp 2, ring": Layout(degrees={"context_parallel_replicate": 2}),
    "cp 2, gather": Layout(degrees={"context_parallel_shard": 2}, context_method="all_gather"),
    "pp 2, 1f1b": Layout(degrees=PIPELINE, schedule="1f1b"),
    "pp 2, zero bubble v": Layout(degrees=PIPELINE, schedule="zero_bubble_v"),
    "tp 2 x shard 2": Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2}, sequence_parallel=True),
    "pp 2 x tp 2": Layout(degrees={**PIPELINE, "tensor_parallel": 2}, schedule="1f1b", sequence_parallel=True),
    "cp 2 x shard 2": Layout(degrees={"context_parallel_shard": 2, "data_parallel_shard": 2}),
    "pp 2 x cp 2": Layout(degrees={**PIPELINE, "context_parallel_shard": 2}, schedule="1f1b"),
    "ep 2": Layout(degrees={"data_parallel_replicate": 2, "expert_parallel": 2}),
    "ep 2 x shard 2": Layout(degrees={"data_parallel_shard": 2, "expert_parallel": 2}),
    "pp 2 x ep 2": Layout(
        degrees={**PIPELINE, "data_parallel_shard": 2, "expert_parallel": 2}, schedule="zero_bubble_v"
    ),
    "ep 2 x tp 2": Layout(
        degrees={"data_parallel_shard": 2, "expert_parallel": 2, "tensor_parallel": 2}, sequence_parallel=True
    ),
    "tp 2 x shard 2, whole sequences": Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2}),
    "pp 2 x tp 2, whole sequences": Layout(degrees={**PIPELINE, "tensor_parallel": 2}, schedule="1f1b"),
    "ep 2 x tp 2, whole sequences": Layout(
        degrees={"data_parallel_shard": 2, "expert_parallel": 2, "tensor_parallel": 2}
    ),
}
DOUBLE, FLOAT = torch.float64, torch.float32
DEFAULT = {
    (DENSE, "1", DOUBLE),
    (DENSE, "tp 2, parts of sequences", DOUBLE),
    (DENSE, "replicate 2", DOUBLE),
    (DENSE, "pp 2, zero bubble v", DOUBLE),
    (DENSE, "pp 2 x tp 2", DOUBLE),
    (DENSE, "pp 2 x tp 2, whole sequences", FLOAT),
    (DENSE, "cp 2 x shard 2", DOUBLE),
    (MOE, "1", DOUBLE),
    (MOE, "1", FLOAT),
    (MOE, "ep 2", DOUBLE),
    (MOE, "ep 2", FLOAT),
    (MOE, "cp 2, gather", DOUBLE),
    (MOE, "pp 2 x ep 2", DOUBLE),
    (MOE, "ep 2 x tp 2", DOUBLE),
}
"""What runs each time. All else is exhaustive."""


def cases(num_ranks: int) -> list[object]:
    return [
        pytest.param(
            name,
            layout,
            dtype,
            id=f"{name}, {layout}, {str(dtype).removeprefix('torch.')}",
            marks=[] if (name, layout, dtype) in DEFAULT else [pytest.mark.exhaustive],
        )
        for dtype in TOLERANCES
        for name in (DENSE, MOE)
        for layout, described in LAYOUTS.items()
        if described.mesh.world_size == num_ranks
    ]


def tied_cases() -> list[object]:
    default = {(DENSE, "pp 2 x tp 2"), (MOE, "pp 2 x ep 2")}
    return [
        pytest.param(name, layout, marks=[] if (name, layout) in default else [pytest.mark.exhaustive])
        for name in (DENSE, MOE)
        for layout, described in LAYOUTS.items()
        if described.mesh.world_size == 4
    ]


@pytest.mark.parametrize(("name", "layout", "dtype"), cases(1))
def test_one_rank(name: str, layout: str, dtype: torch.dtype):
    check(name, layout, dtype)


@pytest.mark.world_size(2, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "layout", "dtype"), cases(2))
def test_two_ranks(name: str, layout: str, dtype: torch.dtype):
    check(name, layout, dtype)


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "layout", "dtype"), cases(4))
def test_four_ranks(name: str, layout: str, dtype: torch.dtype):
    check(name, layout, dtype)


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "layout"), tied_cases())
def test_tied_weights(name: str, layout: str):
    """The last stage has a copy of what the first one has, and its gradients; each is split, and sharded, as ever."""
    check(name, layout, DOUBLE, tied=True)


def check(name: str, layout: str, dtype: torch.dtype, *, tied: bool = False) -> None:
    tolerance = TOLERANCES[dtype]
    expected = run_plainly(name, dtype, tied=tied)
    assert all(gradient.abs().max() > 1e3 * TOLERANCES[DOUBLE] for gradient in expected.gradients.values())
    run = run_engine(name, dtype, LAYOUTS[layout], TiedProvider if tied else Provider)
    if tied and "pipeline_parallel" in LAYOUTS[layout].degrees:
        for tensors in (expected.gradients, expected.parameters):
            tensors |= {key.replace(EMBEDDINGS, HEAD): tensors[key] for key in tensors if key.startswith(EMBEDDINGS)}
    assert run.losses == pytest.approx(expected.losses, rel=0, abs=tolerance)
    for found, right in ((run.gradients, expected.gradients), (run.parameters, expected.parameters)):
        assert found  # of all parameters, or of those of this rank's stages
        assert_close_tree(found, {key: right[key] for key in found}, rtol=0, atol=tolerance)
    if "pipeline_parallel" not in LAYOUTS[layout].degrees:
        assert run.gradients.keys() == expected.gradients.keys()
