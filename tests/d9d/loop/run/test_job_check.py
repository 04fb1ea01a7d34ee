"""All problems of a configuration come in one error, before any process group exists."""

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.parallelism.model import decoder_mesh_problems
from tests.d9d.loop.run.regression_job import Provider, build_job
from tests.d9d.module.model.catalogue import CATALOGUE


def test_all_problems_come_at_once_and_early(tmp_path):
    mesh = DeviceMeshParameters(data_parallel_shard=3, pipeline_parallel=2)
    overrides = {"model_stage_factory": {"source_checkpoint": str(tmp_path)}}
    with pytest.raises(ValueError, match="cannot run as it is configured") as caught:
        build_job(mesh, tmp_path, overrides=overrides)
    text = str(caught.value)
    # 16 samples over 3 ranks in microbatches of 2: rounds of 6, so 12 or 18 fit.
    for part in ("needs 6 processes", "runs 1", "pipeline_parallel 2", "source_checkpoint", "Use 12 or 18"):
        assert part in text, part
    assert not dist.is_initialized()


def test_a_pipeline_that_cannot_train_is_found_early(tmp_path):
    overrides = {"pipelining": {"schedule": {"schedule": "inference"}}}
    with pytest.raises(ValueError, match=r"pipelining\.schedule \(inference\) runs no backward passes"):
        build_job(DeviceMeshParameters(pipeline_parallel=2), tmp_path, overrides=overrides)
    overrides = {
        "pipelining": {"schedule": {"schedule": "zero_bubble_v"}},
        "gradient_manager": {"fsdp_keep_sharded": True},
    }
    with pytest.raises(ValueError, match=r"fsdp_keep_sharded \(true\).*\(zero_bubble_v\) splits backward passes"):
        build_job(DeviceMeshParameters(pipeline_parallel=2), tmp_path, overrides=overrides)


def test_a_timeline_after_the_last_step_is_found_early(tmp_path):
    overrides = {"pipelining": {"timeline": {"path": str(tmp_path / "step.svg"), "step": 21}}}
    with pytest.raises(ValueError, match=r"timeline\.step \(21\) is after the last step of the job \(20\)"):
        build_job(DeviceMeshParameters(), tmp_path, overrides=overrides)


def test_a_folder_that_cannot_be_written_to_is_found_early(tmp_path):
    (tmp_path / "file").write_text("")
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "file" / "saved"), "period_steps": 1}}
    with pytest.raises(ValueError, match=r"save_dir \(.*file/saved/job\) cannot be written to: .*Not a directory"):
        build_job(DeviceMeshParameters(), tmp_path, overrides=overrides)


def test_another_optimizer_cannot_resume(tmp_path):
    overrides = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 1}}
    build_job(DeviceMeshParameters(), tmp_path, total_steps=1, overrides=overrides).trainer.train()
    other = build_job(
        DeviceMeshParameters(),
        tmp_path,
        total_steps=2,
        overrides=overrides,
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
    )
    with pytest.raises(ValueError, match=r"(?s)cannot resume from the checkpoint .*save-1:.*start another run"):
        other.trainer.train()


def test_the_best_checkpoints_need_values(tmp_path):
    best = {"metric": "loss", "mode": "min"}
    checkpointing = {"save_dir": str(tmp_path / "saved"), "period_steps": 1, "num_to_keep": 1, "on_best": best}
    logging = {"period_steps": "disable", "tracker": {"provider": "null"}}
    with pytest.raises(ValueError, match=r"on_best needs logged values"):
        build_job(DeviceMeshParameters(), tmp_path, overrides={"checkpointing": checkpointing, "logging": logging})
    with pytest.raises(ValueError, match=r"on_best keeps checkpoints that num_to_keep would remove"):
        build_job(DeviceMeshParameters(), tmp_path, overrides={"checkpointing": {**checkpointing, "num_to_keep": None}})
    other = {**checkpointing, "on_best": {**best, "metric": "los"}}
    job = build_job(DeviceMeshParameters(), tmp_path, overrides={"checkpointing": other})
    with pytest.raises(
        ValueError, match=r"on_best\.metric: no value of the name 'los' is logged; there are .*loss, samples"
    ):
        job.trainer.train()


def test_the_best_checkpoint_by_loss_is_kept(tmp_path):
    best = {"metric": "loss", "mode": "min"}
    checkpointing = {"save_dir": str(tmp_path / "saved"), "period_steps": 1, "num_to_keep": 1, "on_best": best}
    job = build_job(DeviceMeshParameters(), tmp_path, total_steps=6, overrides={"checkpointing": checkpointing})
    job.trainer.train()
    losses = job.losses()  # after a step, of the batch of that step
    smallest = min(losses, key=losses.__getitem__)
    assert {path.name for path in (tmp_path / "saved" / "job").iterdir()} == {f"save-{smallest}", "save-6"}


class UnevenProvider(Provider):
    """Says what its model, of the catalogue, does not fit."""

    def mesh_problems(self, mesh: DeviceMeshParameters, num_stages: int) -> list[str]:
        return decoder_mesh_problems(CATALOGUE["qwen3 moe"].params(False), mesh, num_stages)


def test_heads_experts_and_layers_are_checked_early(tmp_path):
    """Of a mesh of 4 x 3 x 3 ranks: 4 and 2 heads, 4 experts, and 2 + 2 layers in two stages on each rank."""
    mesh = DeviceMeshParameters(pipeline_parallel=4, data_parallel_shard=3, tensor_parallel=3, expert_parallel=3)
    overrides = {"pipelining": {"schedule": {"schedule": "zero_bubble_v"}}}
    provider = UnevenProvider(torch.float64, 0.0)
    with pytest.raises(ValueError, match="cannot run as it is configured") as caught:
        build_job(mesh, tmp_path, overrides=overrides, model_provider=provider)
    text = str(caught.value)
    for part in (
        "needs 36 processes",
        "4 query heads and 2 key and value heads can not be shared evenly by tensor_parallel = 3 ranks",
        "Set tensor_parallel to one of 1, 2",
        "4 experts can not be shared evenly by 3 ranks. Set expert_parallel to one of 1, 2, 4",
        "cannot fill 8 stages: use at most 4 stages",
        "Use 12 or 18",
    ):
        assert part in text, part
    assert not dist.is_initialized()
