"""The norm of a job: the clip oracle (3 | 4) and 12 make 13, another stage's 84 makes 85."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from d9d.core.dist_context import DENSE_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters
from d9d.internals.grad_norm import (
    LocalGradients,
    clip_grad_norm_distributed_,
    clip_local_gradients_,
    group_parameters_for_norm,
)

EPSILON_EFFECT = 1e-6
"""Torch's 1e-6 in the denominator changes factors by less than this, relative to norms above 1."""


def parameter_with(local: list[float], mesh=None, placements=(), dtype=torch.float64) -> nn.Parameter:
    """Return a parameter whose local gradient has the given values."""
    tensor = torch.tensor(local, dtype=dtype)
    grad = tensor if mesh is None else DTensor.from_local(tensor, mesh, placements, run_check=False)
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def grad_of(parameter: nn.Parameter) -> list[float]:
    grad = parameter.grad
    return (grad.to_local() if isinstance(grad, DTensor) else grad).tolist()


def clip(parameters: list[nn.Parameter], max_norm: float | None, norm_type: float = 2.0, pp_mesh=None) -> float:
    return clip_grad_norm_distributed_(group_parameters_for_norm(parameters), max_norm, norm_type, pp_mesh).item()


def oracle_parameters(mesh: torch.distributed.DeviceMesh) -> list[nn.Parameter]:
    """(3 | 4) sharded on a 1-D mesh, 12 replicated on a slice of the 2-D mesh, and a plain 0."""
    shards = mesh["dp_cp_shard"]
    own = 3.0 + shards.get_local_rank()
    return [
        parameter_with([own], shards, [Shard(0)]),
        parameter_with([12.0], mesh["dp_cp_shard", "cp_replicate"], [Replicate(), Replicate()]),
        parameter_with([0.0]),
    ]


@pytest.mark.world_size(2)
def test_the_oracle_on_mixed_meshes():
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)
    parameters = oracle_parameters(mesh)
    assert clip(parameters, None) == 13.0
    assert grad_of(parameters[1]) == [12.0]
    assert clip(parameters, 1.3) == 13.0
    own = 3.0 + dist.get_rank()
    for parameter, before in zip(parameters, (own, 12.0, 0.0), strict=True):
        assert grad_of(parameter) == pytest.approx([before * 0.1], rel=EPSILON_EFFECT)
    assert clip(parameters, 100.0) == pytest.approx(1.3, rel=EPSILON_EFFECT)  # below the limit nothing is scaled up


@pytest.mark.world_size(4)
def test_the_oracle_with_another_stage():
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build()
    mesh, pp_mesh = context.mesh_for(DENSE_DOMAIN), context.mesh_for(REGULAR_DOMAIN)["pp"]
    if pp_mesh.get_local_rank() == 0:
        parameters = oracle_parameters(mesh)
    else:
        parameters = [parameter_with([84.0], mesh["dp_cp_shard"], [Replicate()])]
    before = [grad_of(parameter)[0] for parameter in parameters]
    assert clip(parameters, 8.5, pp_mesh=pp_mesh) == 85.0
    for parameter, value in zip(parameters, before, strict=True):
        assert grad_of(parameter) == pytest.approx([value * 0.1], rel=EPSILON_EFFECT)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("norm_type", "expected"), [(1.0, 3 + 4 + 12 + 84), (math.inf, 84.0), (3.0, None)])
def test_other_norms(norm_type: float, expected: float | None):
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build()
    mesh, pp_mesh = context.mesh_for(DENSE_DOMAIN), context.mesh_for(REGULAR_DOMAIN)["pp"]
    parameters = oracle_parameters(mesh) if pp_mesh.get_local_rank() == 0 else [parameter_with([-84.0])]
    if expected is None:
        expected = sum(value**norm_type for value in (3, 4, 12, 84)) ** (1 / norm_type)
    assert clip(parameters, None, norm_type, pp_mesh) == pytest.approx(expected, rel=1e-12)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("other", ["nothing to train", "another dtype"])
def test_stages_of_different_kinds(other: str):
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build()
    mesh, pp_mesh = context.mesh_for(DENSE_DOMAIN), context.mesh_for(REGULAR_DOMAIN)["pp"]
    if pp_mesh.get_local_rank() == 0:
        parameters = oracle_parameters(mesh)
    else:
        parameters = [] if other == "nothing to train" else [parameter_with([84.0], dtype=torch.float32)]
    expected = {"nothing to train": 13.0, "another dtype": 85.0}
    assert clip(parameters, None, pp_mesh=pp_mesh) == expected[other]


@pytest.mark.world_size(4)
def test_hybrid_shards_count_once():
    mesh = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)
    hybrid = mesh["dp_replicate", "dp_cp_shard"]
    parameters = [
        parameter_with([3.0 + hybrid.get_local_rank("dp_cp_shard")], hybrid, [Replicate(), Shard(0)]),
        # Cut along both dimensions: four parts of 6 make 12.
        parameter_with([6.0], hybrid, [Shard(0), Shard(0)]),
    ]
    assert clip(parameters, None) == 13.0


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("bad", "expected"), [(math.inf, math.inf), (math.nan, math.nan)])
def test_ranks_agree_on_a_norm_that_is_not_finite(bad: float, expected: float):
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    parameters = [parameter_with([bad if dist.get_rank() else 1.0], mesh, [Shard(0)])]
    assert clip(parameters, None) == pytest.approx(expected, nan_ok=True)
    assert clip(parameters, None, math.inf) == math.inf


@pytest.mark.world_size(2)
def test_an_empty_shard_and_an_unused_parameter(monkeypatch: pytest.MonkeyPatch):
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    is_second = dist.get_rank() == 1
    sums: list[int] = []
    original = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: (sums.append(1), original(*args, **kwargs))[1])
    empty = parameter_with([] if is_second else [3.0], mesh, [Shard(0)])
    for norm_type, expected in ((2.0, 5.0), (math.inf, 4.0)):
        unused = parameter_with([1.0], mesh, [Shard(0)])
        unused.grad = None
        rest = [parameter_with([0.0 if is_second else 4.0], mesh, [Shard(0)]) for _ in range(1)]
        assert clip([empty, unused, *rest, parameter_with([0.0])], 100.0, norm_type) == expected
    assert len(sums) == 2  # three sharded parameters, one collective per norm
    assert clip([unused], 1.0) == 0.0


def test_mixed_dtypes_on_one_process():
    parameters = [
        parameter_with([3.0], dtype=torch.bfloat16),
        parameter_with([4.0]),
        parameter_with([12.0], dtype=torch.float32),
    ]
    assert clip(parameters, 1.3) == 13.0
    assert [parameter.grad.dtype for parameter in parameters] == [torch.bfloat16, torch.float64, torch.float32]
    assert grad_of(parameters[1]) == pytest.approx([0.4], rel=EPSILON_EFFECT)
    assert grad_of(parameters[0]) == pytest.approx([0.3], rel=2**-8)  # bfloat16 has 8 bits


def test_a_bfloat16_norm_is_summed_in_float32():
    # 4,096 ones have the norm 64; bfloat16 stops counting at 256.
    assert clip([parameter_with([1.0] * 4096, dtype=torch.bfloat16)], None) == 64.0


def test_a_parameter_counts_once_and_none_is_zero():
    parameter = parameter_with([5.0])
    assert clip([parameter, parameter], None) == 5.0
    assert clip([], 1.0) == 0.0


def test_copies_are_scaled_but_do_not_count():
    counted, copies = (
        LocalGradients(
            shard_groups=(),
            tensors=[torch.tensor(values)],
            device=torch.device("cpu"),
            dtype=torch.float32,
            is_counted=is_counted,
        )
        for values, is_counted in (([3.0, 4.0], True), ([4.0], False))
    )
    assert clip_local_gradients_([copies, counted], 0.5, 2.0, None) == 5.0
    assert copies.tensors[0].tolist() == pytest.approx([0.4], rel=EPSILON_EFFECT)
    assert counted.tensors[0].tolist() == pytest.approx([0.3, 0.4], rel=EPSILON_EFFECT)
    assert clip_local_gradients_([copies], 0.5, 2.0, None) == 0.0
