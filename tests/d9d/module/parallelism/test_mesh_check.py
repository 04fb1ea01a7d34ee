"""What of a model does not fit a mesh is told from its config, with the degrees that would."""

import pytest

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.parallelism.model import decoder_mesh_problems
from tests.d9d.module.model.catalogue import CATALOGUE, deepseek_v3

# Heads 4; key and value heads 2, or 4 in DeepSeek-V3; experts 4, or 8; layers 2, and 1 + 1 virtual ones.
DEGREES = {
    "qwen3 dense": (None, "1, 2"),
    "llama": (None, "1, 2"),
    "qwen3 moe": ("1, 2, 4", "1, 2"),
    "deepseek v3": ("1, 2, 4, 8", "1, 2, 4"),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_all_problems_of_a_model_come_at_once(name: str):
    experts, heads = DEGREES[name]
    mesh = DeviceMeshParameters(pipeline_parallel=5, tensor_parallel=3, data_parallel_replicate=3, expert_parallel=3)
    problems = decoder_mesh_problems(CATALOGUE[name].params(False), mesh)
    assert len(problems) == (2 if experts is None else 3)
    assert f"Set tensor_parallel to one of {heads}." in problems[0]
    assert f"Set expert_parallel to one of {experts}." in problems[1] or experts is None
    assert "2 layers with 1 + 1 virtual layers cannot fill 5 stages: use at most 4 stages" in problems[-1]


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_fits_is_no_problem(name: str):
    mesh = DeviceMeshParameters(pipeline_parallel=2, tensor_parallel=2, data_parallel_shard=2, expert_parallel=2)
    params = CATALOGUE[name].params(False)
    assert not decoder_mesh_problems(params, mesh)
    assert not decoder_mesh_problems(params, mesh, num_stages=4)
    assert decoder_mesh_problems(params, mesh, num_stages=6)


def test_shared_key_and_value_heads():
    params, mesh = CATALOGUE["llama"].params(False), DeviceMeshParameters(tensor_parallel=4)
    (problem,) = decoder_mesh_problems(params, mesh)
    assert "4 query heads and 2 key and value heads" in problem
    assert "replicate_kv_heads=True" in problem
    assert not decoder_mesh_problems(params, mesh, replicate_kv_heads=True)


def test_a_model_without_experts_may_have_any_number_of_expert_ranks():
    row = deepseek_v3(8, "interleaved")
    params = row.params(False).model_copy(update={"num_dense_layers": 2})
    mesh = DeviceMeshParameters(data_parallel_replicate=3, expert_parallel=3)
    assert not decoder_mesh_problems(params, mesh)
    assert decoder_mesh_problems(row.params(False), mesh)
