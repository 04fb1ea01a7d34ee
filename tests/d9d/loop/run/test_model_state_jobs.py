"""Jobs that start from a model state, and export one: against plain PyTorch and the safetensors library."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.control import (
    PrepareExportModelStageContext,
    PrepareExportModelStageResult,
    RegisterModelEventsContext,
)
from d9d.loop.event.catalogue.inference import EVENT_INFERENCE_MODEL_STAGES_READY
from d9d.loop.run import Trainer
from d9d.model_state.io.manifest import MANIFEST_NAME
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from tests.d9d.loop.run.pipelined_job import PipelinedModel, PipelinedProvider, build_whole_model
from tests.d9d.loop.run.regression_job import Job, build_job, plain_losses
from tests.d9d.loop.run.test_inference import build as build_inference
from tests.harness.parity import FP64_EXACT, named_full_parameters

NUM_STEPS = 3


class Provider(PipelinedProvider):
    """Exports under the names of the model."""

    def prepare_export_model_stage(
        self, context: PrepareExportModelStageContext[PipelinedModel]
    ) -> PrepareExportModelStageResult:
        return PrepareExportModelStageResult(state_mapper=identity_mapper_from_module(context.model))


def fill(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give a model values that no initialisation gives it, and return them."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def write_source(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir()
        save_file(tensors, folder / "weights.safetensors")
    if dist.is_initialized():
        dist.barrier()
    return folder


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def build(mesh: DeviceMeshParameters, folder: Path, source: Path | None, **options: Any) -> Job:
    pipelining = {"schedule": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": False}}
    overrides = {"model_stage_factory": {"source_checkpoint": source}, **options.pop("overrides", {})}
    if mesh.has_pipeline_parallel:
        overrides["pipelining"] = pipelining
    provider = Provider(torch.float64)
    return build_job(
        mesh, folder, model_provider=provider, overrides=overrides, **{"total_steps": NUM_STEPS, **options}
    )


def close(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(tensors, expected, rtol=0, atol=FP64_EXACT)


def check_training(mesh: DeviceMeshParameters, folder: Path) -> None:
    model = build_whole_model(torch.float64)
    source = write_source(folder / "source", fill(model))
    losses, trained = plain_losses(NUM_STEPS, torch.float64, model=model)
    job = build(mesh, folder, source)
    job.trainer.export(folder / "untrained", load_checkpoint=False)
    assert_same(read_export(folder / "untrained"), load_file(source / "weights.safetensors"))
    job.trainer.train()
    job.trainer.export(folder / "exported", load_checkpoint=False)
    close(read_export(folder / "exported"), dict(trained.state_dict()))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.testing.assert_close(list(job.losses().values()), losses, rtol=0, atol=FP64_EXACT)


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def test_one_process(tmp_path: Path):
    check_training(DeviceMeshParameters(), tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "degrees", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str
)
def test_two_ranks(degrees: dict[str, int], tmp_path: Path):
    check_training(DeviceMeshParameters(**degrees), tmp_path)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        {"pipeline_parallel": 2, "data_parallel_shard": 2},
        {"pipeline_parallel": 2, "data_parallel_replicate": 2},
    ],
    ids=str,
)
def test_four_ranks(degrees: dict[str, int], tmp_path: Path):
    check_training(DeviceMeshParameters(**degrees), tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str)
def test_the_newest_checkpoint_is_exported(degrees: dict[str, int], tmp_path: Path):
    mesh = DeviceMeshParameters(**degrees)
    model = build_whole_model(torch.float64)
    source = write_source(tmp_path / "source", fill(model))
    _, trained = plain_losses(NUM_STEPS, torch.float64, model=model)
    checkpointing = {"save_dir": str(tmp_path / "saved"), "period_steps": 2}
    build(mesh, tmp_path, source, overrides={"checkpointing": checkpointing}).trainer.train()
    # A new job has the weights of the source, and the checkpoint those of the last step.
    later = build(mesh, tmp_path, source, overrides={"checkpointing": checkpointing})
    later.trainer.export(tmp_path / "exported", load_checkpoint=True)
    close(read_export(tmp_path / "exported"), dict(trained.state_dict()))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str)
def test_the_form_of_an_export(degrees: dict[str, int], tmp_path: Path):
    trainer = build(DeviceMeshParameters(**degrees), tmp_path, None).trainer
    trainer.export(tmp_path / "whole", load_checkpoint=False)
    trainer.export(
        tmp_path / "exported", load_checkpoint=False, shard_size_gb=1e-7, dtype=torch.bfloat16, manifest=True
    )
    assert (tmp_path / "exported" / MANIFEST_NAME).is_file()
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 2
    whole = read_export(tmp_path / "whole")
    assert_same(read_export(tmp_path / "exported"), {name: tensor.bfloat16() for name, tensor in whole.items()})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str)
def test_the_job_goes_on_while_an_export_is_written(degrees: dict[str, int], tmp_path: Path):
    model = build_whole_model(torch.float64)
    values = fill(model)
    job = build(DeviceMeshParameters(**degrees), tmp_path, write_source(tmp_path / "source", values))
    export = job.trainer.export(tmp_path / "exported", load_checkpoint=False, in_background=True)
    job.trainer.train()
    export.wait()
    assert_same(read_export(tmp_path / "exported"), values)


def test_there_must_be_a_checkpoint(tmp_path: Path):
    trainer: Trainer = build(DeviceMeshParameters(), tmp_path, None).trainer
    with pytest.raises(FileNotFoundError, match=r"checkpoints.*holds no checkpoint"):
        trainer.export(tmp_path / "exported", load_checkpoint=True)


def test_a_provider_without_export_says_so(tmp_path: Path):
    job = build_job(DeviceMeshParameters(), tmp_path, model_provider=PipelinedProvider(torch.float64))
    with pytest.raises(NotImplementedError, match="PipelinedProvider cannot export its model"):
        job.trainer.export(tmp_path / "exported", load_checkpoint=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"trainer\.model_stage_factory\.source_checkpoint .*does not exist \(nearest: 'source'\)"),
        ((), r"source_checkpoint .*holds no model state"),
        ((".metadata",), r"source_checkpoint .*is a training checkpoint, not a model state"),
        (("pytorch_model.bin",), r"source_checkpoint .*pickle"),
        (("model-00001-of-00002.safetensors",), r"source_checkpoint .*not complete"),
    ],
    ids=str,
)
def test_a_bad_source_is_found_early(content: tuple[str, ...] | None, message: str, tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for name in content or ():
        (source / name).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot run as it is configured") as caught:
        build(
            DeviceMeshParameters(pipeline_parallel=2), tmp_path, source if content is not None else tmp_path / "sorce"
        )
    caught.match(message)
    caught.match("needs 2 processes")
    assert not dist.is_initialized()


@pytest.mark.parametrize("named", [".", "model.safetensors", "text_encoder"])
def test_the_cache_of_huggingface_is_read(named: str, tmp_path: Path):
    """Its folders hold links to files beside them."""
    model = build_whole_model(torch.float64)
    root = tmp_path / "models--small"
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "1a"
    (snapshot / "text_encoder").mkdir(parents=True)
    save_file(fill(model), root / "blobs" / "c0ffee")
    (snapshot / "model.safetensors").symlink_to("../../blobs/c0ffee")
    (snapshot / "text_encoder" / "model.safetensors").symlink_to("../../../blobs/c0ffee")
    job = build(DeviceMeshParameters(), tmp_path, snapshot / named)
    assert_same(dict(job.model.state_dict()), dict(model.state_dict()))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str)
def test_inference_loads_a_source(degrees: dict[str, int], tmp_path: Path):
    values = fill(build_whole_model(torch.float64))
    source = write_source(tmp_path / "source", values)
    overrides = {"model_stage_factory": {"source_checkpoint": source}}
    ready: list[nn.Module] = []

    class Watching(Provider):
        def register_events(self, context: RegisterModelEventsContext) -> None:
            context.event_bus.subscribe(EVENT_INFERENCE_MODEL_STAGES_READY, lambda event: ready.extend(event.modules))

    provider = Watching(torch.float64)
    build_inference(DeviceMeshParameters(**degrees), tmp_path, overrides=overrides, model_provider=provider)
    [stage] = ready
    own = named_full_parameters(stage)
    assert_same(own, {name: values[name] for name in own})
    assert not stage.training
