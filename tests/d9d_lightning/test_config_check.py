"""Wrong options of the strategy: all in one error, before any process group exists."""

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from d9d.pipelining.factory import PipelineScheduleInferenceConfig
from d9d_lightning import D9DStrategy, DeviceMeshParameters
from d9d_lightning.options.config_check import option_problems, process_problems
from d9d_lightning.options.mesh import MeshOption
from tests.d9d_lightning.support import plain_trainer


@pytest.mark.parametrize(
    ("mesh", "num_processes", "expected"),
    [
        (None, 3, {"data_parallel_replicate": 3}),
        ("auto", 1, {}),
        ({}, 4, {}),
        ({"data_parallel_shard": -1}, 4, {"data_parallel_shard": 4}),
        ({"data_parallel_shard": "auto", "tensor_parallel": 2}, 8, {"data_parallel_shard": 4, "tensor_parallel": 2}),
        ({"tensor_parallel": 2, "pipeline_parallel": -1}, 2, {"tensor_parallel": 2}),
        ({"data_parallel_shard": -1, "expert_parallel": 4}, 8, {"data_parallel_shard": 8, "expert_parallel": 4}),
        (DeviceMeshParameters(tensor_parallel=2), 7, {"tensor_parallel": 2}),
    ],
)
def test_open_degrees_are_filled(mesh, num_processes, expected):
    assert MeshOption.read(mesh).fill(num_processes) == DeviceMeshParameters(**expected)


def test_open_degrees_before_the_number_of_processes_is_known():
    strategy = D9DStrategy({"data_parallel_shard": -1, "tensor_parallel": 2})
    assert strategy.mesh == DeviceMeshParameters(tensor_parallel=2)
    plain_trainer(strategy=strategy, devices=6)
    assert strategy.mesh == DeviceMeshParameters(tensor_parallel=2, data_parallel_shard=3)


@pytest.mark.parametrize(
    ("mesh", "error", "match"),
    [
        (
            {"data_parallel_shard": -1, "tensor_parallel": -1},
            ValueError,
            "data_parallel_shard and tensor_parallel cannot",
        ),
        ({"expert_parallel": -1}, ValueError, "expert_parallel cannot be left open"),
        ({"tensor_parallel": -2}, ValueError, "^mesh: tensor_parallel is -2: it must be a number of ranks"),
        ({"tensor_parallel": True}, ValueError, "^mesh: tensor_parallel is True: it must be a number of ranks"),
        ({"tp": -1}, ValueError, "^mesh: 'tp' is no degree. Valid are pipeline_parallel, "),
        (
            {"data_paralel_shard": 2, "tensor_parallel": 0},
            ValueError,
            r"Did you mean 'data_parallel_shard'\? Valid are .*\. tensor_parallel is 0: ",
        ),
        (
            {"data_parallel_shard": 2, "expert_parallel": 4},
            ValueError,
            r"^mesh: expert_parallel \(4\) must divide .* Valid values: 1, 2\.$",
        ),
        ("all", ValueError, r"mesh \('all'\) must be 'auto'"),
        (2, ValueError, r"mesh \(2\) must be 'auto', a mapping of degrees"),
        ([2], ValueError, r"mesh \(\[2\]\) must be 'auto'"),
    ],
)
def test_malformed_meshes(mesh, error, match):
    with pytest.raises(error, match=match):
        D9DStrategy(mesh)


def test_processes_that_cannot_be_shared_out():
    match = r"6 processes \(devices \* num_nodes\) are no multiple of tensor_parallel 4 = 4. Use 4 or 8 processes"
    with pytest.raises(ValueError, match=match):
        plain_trainer(strategy=D9DStrategy({"data_parallel_shard": -1, "tensor_parallel": 4}), devices=6)


def problems_of(mesh=None, num_devices=4, num_nodes=1, **options):
    option = MeshOption.read(mesh)
    of_processes = process_problems(option, LightningEnvironment(), num_devices, num_nodes, options.get("launcher"))
    return of_processes + option_problems(option.smallest, **options)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, []),
        ({"pipeline_module": "model.layers.3", "microbatches": 4, "schedule": "zero_bubble_v", "launcher": "fork"}, []),
        ({"mesh": {"pipeline_parallel": 4}}, ["pipeline_parallel (4) needs pipeline_module"]),
        ({"pipeline_module": "model..layers"}, ["pipeline_module ('model..layers') must be the dotted name"]),
        ({"pipeline_module": ""}, ["pipeline_module ('') must be the dotted name"]),
        ({"microbatches": 0}, ["microbatches (0) must be a whole number of at least 1"]),
        ({"microbatches": True}, ["microbatches (True)"]),
        ({"microbatches": 2.0}, ["microbatches (2.0)"]),
        ({"has_mp_policy": True}, []),
        (
            {"has_mp_policy": True, "mesh": {"pipeline_parallel": 4}, "pipeline_module": "model"},
            ["mp_policy does not work with pipeline_parallel > 1"],
        ),
        ({"bucket_size_mb": 0}, ["bucket_size_mb (0) must be a number of more than 0"]),
        ({"min_unit_params": -1}, ["min_unit_params (-1) must be a number of at least 0"]),
        ({"min_unit_params": 0, "bucket_size_mb": 0.5, "timeout_s": 1e-3}, []),
        ({"timeout_s": 0.0}, ["timeout_s (0.0) must be a number of more than 0, in seconds, or None"]),
        ({"timeout_s": float("inf")}, ["timeout_s (inf)"]),
        ({"timeout_s": 5, "init_timeout_s": 60}, []),
        ({"timeout_s": 5, "init_timeout_s": -1}, ["init_timeout_s (-1) must be a number of more than 0"]),
        ({"init_timeout_s": 60}, ["init_timeout_s (60) needs timeout_s"]),
        ({"timeout_s": "5"}, ["timeout_s ('5')"]),
        ({"schedule": "1f2b"}, ["schedule '1f2b' is not known"]),
        ({"schedule": "inference"}, ["runs no backward passes"]),
        ({"schedule": PipelineScheduleInferenceConfig()}, ["runs no backward passes"]),
        ({"launcher": "spwan"}, ["Did you mean 'spawn'?"]),
        ({"launcher": "srun"}, ["launcher ('srun') is not known: choose script, fork or spawn"]),
        (
            {"launcher": "fork", "num_nodes": 2},
            ["launcher ('fork') starts processes on one machine, but num_nodes is 2"],
        ),
        ({"mesh": {"context_parallel_shard": 4}}, ["does not support context_parallel_shard (4): training_step"]),
        (
            {
                "mesh": {"pipeline_parallel": 2, "context_parallel_shard": 2, "tensor_parallel": 2},
                "schedule": "none",
                "microbatches": -1,
                "launcher": "none",
            },
            [
                "The mesh needs 8 processes",
                "does not support context_parallel_shard (2): training_step",
                "schedule 'none' is not known",
                "pipeline_parallel (2) needs pipeline_module",
                "microbatches (-1)",
                "launcher ('none') is not known",
            ],
        ),
    ],
)
def test_problems(options, texts, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    problems = problems_of(**options)
    assert len(problems) == len(texts), problems
    for problem, text in zip(problems, texts, strict=True):
        assert text in problem


def test_notebooks_run_no_scripts(monkeypatch):
    monkeypatch.setattr("d9d_lightning.options.config_check._IS_INTERACTIVE", True)
    assert "a notebook cannot be run again as a script" in problems_of(launcher="script")[0]
    assert problems_of(launcher=None) == []


def test_all_problems_come_in_one_error():
    numbers = {"microbatches": 0, "bucket_size_mb": -1, "min_unit_params": -2, "timeout_s": 0}
    with pytest.raises(ValueError, match="D9DStrategy cannot run as it is configured") as error:
        D9DStrategy({"pipeline_parallel": 2}, {"blocks.*": "shrd"}, schedule="none", **numbers)
    assert str(error.value).count("\n- ") == 7
    assert "Did you mean 'shard'?" in str(error.value)


def test_a_bad_mesh_or_plan_hides_no_other_problem(tmp_path):
    with pytest.raises(ValueError, match="D9DStrategy cannot run as it is configured") as error:
        D9DStrategy({"tp": 2}, str(tmp_path / "plan.yaml"), microbatches=0)
    for text in ("mesh: 'tp' is no degree", "plan.yaml", "microbatches (0)"):
        assert text in str(error.value)


def test_all_that_is_wrong_with_processes_comes_in_one_error(tmp_path):
    strategy = D9DStrategy({"tensor_parallel": 2}, source_checkpoint=tmp_path / "none", launcher="fork")
    with pytest.raises(ValueError, match="D9DStrategy cannot run as it is configured") as error:
        plain_trainer(strategy=strategy, devices=3, num_nodes=2)
    for text in ("The mesh needs 2 processes", "launcher ('fork')", "source_checkpoint"):
        assert text in str(error.value)
    assert not dist.is_initialized()


def test_the_number_of_processes_decides_what_an_open_degree_needs():
    strategy = D9DStrategy({"pipeline_parallel": -1})
    with pytest.raises(ValueError, match=r"^pipeline_parallel \(2\) needs pipeline_module"):
        plain_trainer(strategy=strategy, devices=2)


def test_a_module_to_cut_on_a_mesh_without_pipeline():
    plain_trainer(strategy=D9DStrategy({"data_parallel_shard": 2}, pipeline_module="model"), devices=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parallelize": 3}, r"parallelize \(3\) must be a mapping of patterns to words"),
        ({"parallelize": ["blocks.*"]}, r"parallelize \(\['blocks.\*'\]\) must be"),
        ({"mp_policy": "bf16"}, r"mp_policy \('bf16'\) must be a torch.distributed.fsdp.MixedPrecisionPolicy"),
        ({"reshard_after_forward": "yes"}, r"reshard_after_forward \('yes'\) must be True, False, a number of ranks"),
        ({"stages": ["embed"]}, r"stages \(\['embed'\]\) must be a PipelineStages"),
    ],
)
def test_options_of_another_kind(options, text):
    with pytest.raises(ValueError, match=text):
        D9DStrategy(**options)
